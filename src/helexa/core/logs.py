"""Logging as text or JSON, with the request id in each line."""

import json
import logging
import os
import re
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from helexa.core.errors import ConfigError

LogFormat = Literal["text", "json"]

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the current request; empty outside of a request."""

_PLAIN = re.compile(r"[\w./:%@+,-]+", re.ASCII)


def configure(form: LogFormat, level: str = "INFO", environ: Mapping[str, str] = os.environ) -> None:
    """Send all log lines to stderr. `$HELEXA_LOG` (a level) and `$HELEXA_LOG_FORMAT` override the arguments.

    Raises:
        ConfigError: the level or format is unknown.
    """
    level = environ.get("HELEXA_LOG", level).upper()
    if level not in logging.getLevelNamesMapping():
        raise ConfigError(f"HELEXA_LOG is '{level}', expected one of {', '.join(logging.getLevelNamesMapping())}")
    log_format = environ.get("HELEXA_LOG_FORMAT", form)
    if log_format not in get_args(LogFormat):
        raise ConfigError(f"HELEXA_LOG_FORMAT is '{log_format}', expected one of {', '.join(get_args(LogFormat))}")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)


def tell(logger: logging.Logger, level: int, event: str, /, **facts: Any) -> None:
    """Log an event: in text as `event key=value ...`, in JSON with one member per fact."""
    if logger.isEnabledFor(level):
        text = " ".join([event, *(f"{name}={_shown(value)}" for name, value in facts.items())])
        logger.log(level, "%s", text, extra={"event": event, "facts": facts})


class TextLines(logging.Formatter):
    """Formats plain text lines."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line with the request id."""
        number = request_id.get()
        return super().formatMessage(record) + (f" request={number}" if number else "")


class JsonLines(logging.Formatter):
    """Formats one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if number := request_id.get():
            line["request"] = number
        if event := getattr(record, "event", None):
            line["event"] = event
            line |= {name: value for name, value in record.__dict__["facts"].items() if name not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _shown(value: object) -> str:
    """Return a value for a text line; ambiguous strings are quoted."""
    return repr(value) if isinstance(value, str) and not _PLAIN.fullmatch(value) else str(value)
