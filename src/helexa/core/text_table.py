"""Plain-text tables for the command line, formatted by rich."""

from collections.abc import Sequence

_MAX_WIDTH = 1 << 20  # columns: wide enough that no table is cut or wrapped


def text_table(headings: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[str] = ()) -> str:
    """Format rows as a text table with aligned columns, without color.

    Args:
        headings: headings of the columns.
        rows: rows with one value per heading. A float is shown with one decimal, and None as a dash.
        right: headings of the columns to align right. Columns of numbers are always aligned right.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column, heading in enumerate(headings):
        is_number = bool(rows) and all(isinstance(row[column], int | float | None) for row in rows)
        table.add_column(heading, justify="right" if is_number or heading in right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    console = Console(color_system=None, width=_MAX_WIDTH)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def printable(text: object) -> str:
    """Return untrusted text as one line without control characters, which can be printed to a terminal safely."""
    return " ".join("".join(char for char in str(text) if char.isprintable() or char.isspace()).split())


def _cell(value: object) -> str:
    match value:
        case None:
            return "-"
        case float():
            return f"{value:.1f}"
        case _:
            return printable(value)
