"""Parser of the C header `native/kernels/kernels.h`, whose constants and struct fields Python code also uses.

The header may contain `#define`s of integers, structs of numbers and pointers, and the lines that `_IGNORED` matches.
The parser raises an error for all other lines.
"""

import re
from pathlib import Path
from typing import NamedTuple

_PATH = Path(__file__).parent / "native" / "kernels" / "kernels.h"
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_IGNORED = r"#(?:ifndef|define) KERNELS_H\n|#endif|#include <stdint.h>|#define nullable\s|typedef uint16_t bfloat16;"
_CONSTANT = r"#define (?P<name>\w+) (?P<value>-?\d+)\s"
_STRUCT = r"typedef struct \{(?P<fields>[^{}]*)\} (?P<struct>\w+);"
_DECLARATION = re.compile(rf"\s*(?:{_CONSTANT}|{_STRUCT}|{_IGNORED})")
_FIELDS = re.compile(r"\s*(?:const )?(?P<type>\w+) (?P<names>[^;]+);")
_NAME = re.compile(r"\s*(?P<pointer>\*(?P<nullable>nullable )?)?(?P<name>\w+)")


class Field(NamedTuple):
    """A field of a C struct: a number, or a pointer to numbers or structs.

    Attributes:
        name: name of the field.
        type: C type of the number, or of the pointer's target.
        pointer: whether the field is a pointer.
        nullable: whether the pointer may be null.
    """

    name: str
    type: str
    pointer: bool
    nullable: bool


def _parse(text: str) -> tuple[dict[str, int], dict[str, list[Field]]]:
    """Return the constants of a header by name, and the fields of its structs by struct name.

    Raises:
        ValueError: the header contains an unsupported line; the message quotes the line.
    """
    constants: dict[str, int] = {}
    structs: dict[str, list[Field]] = {}
    for declaration in _consecutive(_DECLARATION, _COMMENT.sub(" ", text)):
        if declaration["name"]:
            constants[declaration["name"]] = int(declaration["value"])
        if declaration["struct"]:
            structs[declaration["struct"]] = [
                Field(name["name"], fields["type"], bool(name["pointer"]), bool(name["nullable"]))
                for fields in _consecutive(_FIELDS, declaration["fields"])
                for declarator in fields["names"].split(",")
                for name in _consecutive(_NAME, declarator)
            ]
    return constants, structs


def _consecutive(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """Match `pattern` repeatedly from the start to the end of `text`, and return the matches.

    Raises:
        ValueError: `pattern` does not match at the end of the previous match; the message quotes the line there.
    """
    text, end, matches = text.rstrip(), 0, list[re.Match[str]]()
    while end < len(text):
        match = pattern.match(text, end)
        if match is None:
            raise ValueError(f"kernels.h: cannot read {text[end:].strip().splitlines()[0]!r}")
        matches.append(match)
        end = match.end()
    return matches


CONSTANTS, STRUCTS = _parse(_PATH.read_text())
