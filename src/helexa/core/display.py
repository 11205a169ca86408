"""Text for people: sizes, tables, and untrusted text without control characters."""

from collections.abc import Sequence

_MAX_WIDTH = 1 << 20  # columns: wide enough that no table is cut or wrapped


def memory_text(megabytes: float) -> str:
    """Return an amount of memory in MiB as text, such as `812 MB` or `4.25 GB`."""
    # GB means GiB here, as in the data sheets of GPUs: a card of 24,576 MiB has 24 GB.
    if abs(megabytes) < 1024:
        return f"{megabytes:.0f} MB"
    gigabytes = megabytes / 1024
    return f"{gigabytes:.2f} GB" if abs(gigabytes) < 9.995 else f"{gigabytes:.1f} GB"


def file_size_text(count: int) -> str:
    """Return a number of bytes of files, disks or downloads as text, such as `4.1 GB`."""
    # GB means 10^9 bytes here, as on model hubs and in the data sheets of disks.
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"


def text_table(headings: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[str] = ()) -> str:
    """Format rows as a text table with aligned columns, without color.

    Args:
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
    """Return untrusted text as one line that is safe to print to a terminal."""
    return " ".join("".join(char for char in str(text) if char.isprintable() or char.isspace()).split())


def _cell(value: object) -> str:
    match value:
        case None:
            return "-"
        case float():
            return f"{value:.1f}"
        case _:
            return printable(value)
