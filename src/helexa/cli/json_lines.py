"""JSON output of commands, for programs that read it from stdout."""

import json

_RAW_CONTROLS = {code: f"\\u{code:04x}" for code in (0x7F, *range(0x80, 0xA0))}


def json_text(value: object, indent: int | None = None) -> str:
    """Return a value as JSON text in which all control characters are escaped. `indent` is as in `json.dumps`."""
    return json.dumps(value, ensure_ascii=False, indent=indent).translate(_RAW_CONTROLS)
