"""Memory of one device, as a process of the engine reports it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceMemory:
    """Measured memory of one GPU, in bytes.

    Attributes:
        weights: allocated for the weights.
        step: allocated by the largest step, in addition to the weights and caches.
        free: free memory, including the memory that the process holds.
    """

    weights: int
    step: int
    free: int
