"""The forms in which a weight leaves a model file."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupwiseTensor:
    """An affinely quantised matrix: `weight = scale * code + minimum`, with one scale and minimum per group along K.

    Attributes:
        codes: uint8 [N, K], one unsigned code per byte.
        scale: floating [N, K // group_size].
        minimum: of scale's dtype and shape.
        bits: 4 when every code is below 16, else 8.
        group_size: codes that share a scale; divides K.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor
    bits: int
    group_size: int

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix, [N, K]."""
        return self.codes.shape

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The plain matrix [N, K] in `dtype`, computed in float32."""
        groups = self.codes.unflatten(-1, (-1, self.group_size)).float()  # [N, K // group_size, group_size]
        groups.mul_(self.scale.float().unsqueeze(-1)).add_(self.minimum.float().unsqueeze(-1))
        return groups.flatten(-2).to(dtype)

    def rows(self, indices: Tensor) -> "GroupwiseTensor":
        """The rows at `indices` [T], still quantised."""
        return replace(self, codes=self.codes[indices], scale=self.scale[indices], minimum=self.minimum[indices])

    def to(self, device: torch.device) -> "GroupwiseTensor":
        """The same matrix on another device."""
        return replace(self, codes=self.codes.to(device), scale=self.scale.to(device), minimum=self.minimum.to(device))


Weight = Tensor | GroupwiseTensor
"""A plain or a quantised weight."""
