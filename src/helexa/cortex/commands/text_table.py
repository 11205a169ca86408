"""Tables for a terminal."""

from collections.abc import Sequence

from helexa.cortex.commands.api_client import printable


def text_table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lines of aligned columns; numbers stand to the right, None is a dash."""
    cells = [list(headings), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(headings))]
    right = [bool(rows) and all(isinstance(row[n], int | float | None) for row in rows) for n in range(len(headings))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if to_the_right else text.ljust(width)
            for text, width, to_the_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in cells
    )


def _cell(value: object) -> str:
    match value:
        case None:
            return "-"
        case float():
            return f"{value:.1f}"
        case _:
            return printable(value)
