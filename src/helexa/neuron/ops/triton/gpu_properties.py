"""Properties of a GPU that determine the tile shapes of kernels."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GpuProperties:
    """Properties of one GPU.

    Attributes:
        capability: CUDA compute capability, major and minor.
        shared_memory: maximum bytes of shared memory per Triton program (thread block).
        processors: number of multiprocessors (SMs).
    """

    capability: tuple[int, int]
    shared_memory: int
    processors: int

    @property
    def tensor_cores(self) -> bool:
        """Whether Triton multiplies on the GPU's tensor cores, which requires compute capability 8.0."""
        return self.capability >= (8, 0)

    @classmethod
    def from_device(cls, device: torch.device) -> "GpuProperties":
        """Return the properties of a CUDA device. For a CPU with Triton's interpreter, return those of a small GPU."""
        if device.type != "cuda":
            return cls((8, 6), 99 << 10, 2)
        properties = torch.cuda.get_device_properties(device)
        shared = getattr(
            properties, "shared_memory_per_block_optin", properties.shared_memory_per_block
        )  # torch reports only one size for AMD GPUs
        return cls((properties.major, properties.minor), shared, properties.multi_processor_count)
