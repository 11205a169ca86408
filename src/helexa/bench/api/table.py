"""CSV output with one column per dataclass field. Nested values are written as JSON."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import orjson

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def to_csv(rows: Sequence[Any], *, head: bool = True) -> bytes:
    """Return `rows` as CSV.

    Args:
        rows: dataclass instances of the same type.
        head: True to write a header line with the field names, if there are rows.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    if rows and head:
        writer.writerow(columns(rows[0]))
    writer.writerows(map(_cells, rows))
    return text.getvalue().encode()


def columns(row: Any) -> list[str]:
    """Return the field names of the dataclass instance `row`."""
    return [field.name for field in fields(row)]


def _cells(row: Any) -> Iterable[object]:
    for name in columns(row):
        value = getattr(row, name)
        if isinstance(value, str) and value.startswith(_FORMULA):
            yield f"'{value}"  # keeps spreadsheets from executing a model's name as a formula
        elif value is None or isinstance(value, str | int | float):
            yield value
        else:
            yield orjson.dumps(value).decode()
