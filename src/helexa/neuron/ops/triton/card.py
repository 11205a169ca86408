"""The card that kernels are built for: what the shapes of their tiles depend on."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Card:
    """One GPU.

    Attributes:
        capability: CUDA's major and minor number.
        shared_memory: bytes that one program may have.
        processors: that run programs side by side.
    """

    capability: tuple[int, int]
    shared_memory: int
    processors: int

    @property
    def tensor_cores(self) -> bool:
        """Whether Triton's products use them; for older cards than these it adds up number by number."""
        return self.capability >= (8, 0)

    @classmethod
    def of(cls, device: torch.device) -> "Card":
        """The card behind a device; a small one for a CPU, where kernels are interpreted."""
        if device.type != "cuda":
            return cls((8, 6), 99 << 10, 2)
        found = torch.cuda.get_device_properties(device)
        shared = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)  # AMD has one size
        return cls((found.major, found.minor), shared, found.multi_processor_count)
