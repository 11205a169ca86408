"""Conversion to float64, for functions whose float32 results depend on the number of elements."""

import torch
from torch import Tensor


def wide(x: Tensor, device: torch.device) -> Tensor:
    """Return `x` as float64, or as float32 if `device` is MPS, which has no float64.

    Callers convert numbers before functions such as the exponential. On a CPU, vector and scalar instructions compute
    the exponential of a float32 number differently. The number of elements, and therefore the number of heads on this
    rank, decides which instructions compute an element. With float64, the results do not depend on this number.
    """
    return x.float() if device.type == "mps" else x.double()
