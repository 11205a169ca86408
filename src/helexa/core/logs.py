"""Formats log lines as text or JSON, with the id of the current request."""

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

# Id of the current request; empty outside of a request.
request_id: ContextVar[str] = ContextVar("request_id", default="")

_PLAIN = re.compile(r"[\w./:%@+,-]+", re.ASCII)


def configure(default_format: LogFormat, level: str = "INFO", environ: Mapping[str, str] = os.environ) -> None:
    """Configure Python's logging to write to stderr.

    The environment variable `HELEXA_LOG` overrides `level`, and can set the levels of single loggers, as in
    `info,helexa.cortex.requests=debug`. The variable `HELEXA_LOG_FORMAT` overrides `default_format`.

    Raises:
        ConfigError: a level or the format is unknown.
    """
    root, levels = _levels(environ.get("HELEXA_LOG", ""), level)
    log_format = environ.get("HELEXA_LOG_FORMAT", default_format)
    if log_format not in get_args(LogFormat):
        raise ConfigError(f"HELEXA_LOG_FORMAT is '{log_format}', expected one of {', '.join(get_args(LogFormat))}")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    logging.basicConfig(level=root, handlers=[handler], force=True)
    for name, logger_level in levels.items():
        logging.getLogger(name).setLevel(logger_level)


def _levels(text: str, default: str) -> tuple[str, dict[str, str]]:
    """Parse `HELEXA_LOG`: the level of all loggers, and levels of single loggers."""
    root, levels = default.upper(), dict[str, str]()
    known = logging.getLevelNamesMapping()
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, level = entry.rpartition("=")
        if level.upper() not in known:
            wrong = f"{name}={level.upper()}".lstrip("=")
            raise ConfigError(f"HELEXA_LOG is '{wrong}', expected one of {', '.join(known)}")
        if name:
            levels[name.strip()] = level.upper()
        else:
            root = level.upper()
    return root, levels


def tell(logger: logging.Logger, level: int, event: str, /, **fields: Any) -> None:
    """Log an event with fields: `event key=value ...`, or one JSON key per field."""
    if logger.isEnabledFor(level):
        text = " ".join([event, *(f"{name}={_formatted(value)}" for name, value in fields.items())])
        logger.log(level, "%s", text, extra={"event": event, "fields": fields})


class TextLines(logging.Formatter):
    """Formats log records as lines of plain text."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return a log record in one line, with the id of the current request."""
        current_id = request_id.get()
        return one_line(super().formatMessage(record)) + (f" request={current_id}" if current_id else "")

    def formatException(self, ei: Any) -> str:
        """Return a traceback with indented lines: its message may quote a client."""
        return "\n".join(f"  {one_line(line)}" for line in super().formatException(ei).splitlines())


class JsonLines(logging.Formatter):
    """Formats each log record as one line with a JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a log record as JSON."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if current_id := request_id.get():
            line["request"] = current_id
        if event := getattr(record, "event", None):
            line["event"] = event
            line |= {name: value for name, value in record.__dict__["fields"].items() if name not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def one_line(text: str) -> str:
    """Return `text` with escapes such as `\\n` for characters that cannot be printed."""
    # Messages may quote clients and model files. A line break in such a text must not begin a line of the log.
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _formatted(value: object) -> str:
    """Return a field's value for a text log line, quoted if it has spaces or quotes."""
    return repr(value) if isinstance(value, str) and not _PLAIN.fullmatch(value) else str(value)
