"""JSON on stdout, for programs."""

import json

_RAW_CONTROLS = {code: f"\\u{code:04x}" for code in (0x7F, *range(0x80, 0xA0))}


def json_text(value: object, indent: int | None = None) -> str:
    """Return JSON with all control characters escaped."""
    return json.dumps(value, ensure_ascii=False, indent=indent).translate(_RAW_CONTROLS)
