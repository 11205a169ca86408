"""The part of a tensor that a rank reads: some of its rows and some of its columns."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Part:
    """Rows and columns of a tensor. The rows are the first dimension, and the columns are the last dimension.

    Attributes:
        rows: int64, numbers of the rows in the order of the result; None for all rows.
        columns: int64, numbers of the columns in the order of the result; None for all columns. Only tensors with two
            dimensions can be read by columns.
    """

    rows: "NDArray[np.int64] | None" = None
    columns: "NDArray[np.int64] | None" = None

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this part of a tensor with the shape `whole`."""
        shape = list(whole)
        if self.rows is not None:
            shape[0] = len(self.rows)
        if self.columns is not None:
            shape[-1] = len(self.columns)
        return tuple(shape)


WHOLE = Part()
"""All rows and all columns."""


def block_numbers(columns: "NDArray[np.int64]", width: int) -> "NDArray[np.int64] | None":
    """Return the numbers of the blocks of `width` adjacent columns of which `columns` consists.

    Returns:
        The block numbers in the order of `columns`; None if `columns` has a part of a block, or a block whose columns
        are in another order.
    """
    import numpy as np  # the server process reads only headers and starts faster without numpy

    first = columns[::width]
    complete = len(columns) % width == 0 and not (first % width).any()
    if not complete or not np.array_equal(columns.reshape(-1, width), first[:, None] + np.arange(width)):
        return None
    return first // width
