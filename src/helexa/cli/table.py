"""Tables for a terminal."""

from collections.abc import Sequence

from helexa.cli.terminal import printable

Cell = str | int | float | None


def print_table(headings: Sequence[str], rows: Sequence[Sequence[Cell]], numbers: Sequence[str] = ()) -> None:
    """Print aligned columns; those whose headings are among `numbers` stand to the right, None is a dash."""
    cells = [list(headings), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(headings))]
    for line in cells:
        aligned = [
            text.rjust(width) if heading in numbers else text.ljust(width)
            for text, width, heading in zip(line, widths, headings, strict=True)
        ]
        print("  ".join(aligned).rstrip())


def _cell(value: Cell) -> str:
    match value:
        case None:
            return "-"
        case float():
            return f"{value:.1f}"
        case _:
            return printable(" ".join(str(value).split()))
