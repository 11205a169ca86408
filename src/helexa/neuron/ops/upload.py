"""Numbers of the host on their way to the device, while both go on."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """The same numbers there. A GPU copies them when it comes to that, from memory that stays where it is until then.

    From other memory it would copy at once, and be waited for with all that it has been told before.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
