"""Float64 for functions whose float32 results depend on the number of elements."""

import torch
from torch import Tensor


def wide(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of `device` as float64, or as float32 on MPS, which has no float64.

    Functions of float64 numbers round alike for any number of elements. On a CPU, vector and scalar instructions
    compute the exponential of a float32 number differently. The number of elements, and therefore the number of heads
    on this rank, decides which instructions compute an element.
    """
    return x.float() if device.type == "mps" else x.double()
