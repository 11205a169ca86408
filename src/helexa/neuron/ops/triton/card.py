"""Properties of the GPU that tile shapes depend on."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Card:
    """Properties of one GPU.

    Attributes:
        capability: CUDA compute capability, major and minor.
        shared_memory: maximum bytes of shared memory per program.
        processors: number of multiprocessors, which run programs in parallel.
    """

    capability: tuple[int, int]
    shared_memory: int
    processors: int

    @property
    def tensor_cores(self) -> bool:
        """Whether Triton uses the GPU's tensor cores; on older GPUs Triton multiplies without tensor cores."""
        return self.capability >= (8, 0)

    @classmethod
    def from_device(cls, device: torch.device) -> "Card":
        """Return the properties of a device; for a CPU with interpreted kernels, those of a small GPU."""
        if device.type != "cuda":
            return cls((8, 6), 99 << 10, 2)
        properties = torch.cuda.get_device_properties(device)
        shared = getattr(
            properties, "shared_memory_per_block_optin", properties.shared_memory_per_block
        )  # AMD has one size
        return cls((properties.major, properties.minor), shared, properties.multi_processor_count)
