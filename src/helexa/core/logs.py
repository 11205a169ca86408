"""Formats log lines as text or JSON, with request ids; keeps the newest lines."""

import json
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from helexa.core.errors import ConfigError

# Limits of `LogLines`.
MAX_LINES = 1000
MAX_CHARS = 2000
_MAX_EXCEPTION_CHARS = 8000
_MIN_SECRET_CHARS = 8  # shorter secrets are not hidden, because they may be parts of ordinary words
_HIDDEN = "[hidden]"
_SECRETS = (
    (re.compile(r"\bhlx_\w+"), _HIDDEN),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]+"), rf"\1 {_HIDDEN}"),
    (re.compile(r"(\w://)[^/\s:@]*:[^/\s@]*@"), rf"\1{_HIDDEN}@"),
    (
        re.compile(r"(?i)((?:password|secret|token|api[_-]?key|authorization)[\"']?\s*[=:]\s*)[\"']?[^\s\"',&]+"),
        rf"\1{_HIDDEN}",
    ),
)

LogFormat = Literal["text", "json"]

# Id of the current request; empty outside of a request.
request_id: ContextVar[str] = ContextVar("request_id", default="")

_PLAIN = re.compile(r"[\w./:%@+,()\[\]~#*?&-]+", re.ASCII)


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
    """Parse `HELEXA_LOG`; return the root logger's level, and those of single loggers."""
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
    """Log an event and its fields: as `event key=value ...`, or as keys in JSON logs."""
    if logger.isEnabledFor(level):
        text = " ".join([event, *(f"{name}={quoted(value)}" for name, value in fields.items())])
        logger.log(level, "%s", text, extra={"event": event, "fields": fields})


def quoted(value: object) -> str:
    """Return a field's value as text, in quotes if it has spaces, quotes, `=` or `;`.

    A text that is empty, or has non-ASCII or other signs than `_./:%@+,()[]~#*?&-`, is quoted, too. An exception
    without a message becomes the name of its class.
    """
    text = str(value)
    if not text and isinstance(value, BaseException):  # for example a TimeoutError
        text = type(value).__name__
    return text if _PLAIN.fullmatch(text) else repr(text)


class TextLines(logging.Formatter):
    """Formats log records as lines of plain text."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return a log record in one line, with the id of the current request."""
        current_id = request_id.get()
        return one_line(super().formatMessage(record)) + (f" request={current_id}" if current_id else "")

    def formatException(self, ei: Any) -> str:
        """Return a traceback, indented so that quoted text cannot pass for log lines."""
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


class LogLines(logging.Handler):
    """Logging handler that keeps the newest `MAX_LINES` lines, without secrets.

    The secrets that `secrets()` returns, if they have 8 or more characters, and texts that look like a key, a password
    or a token, are replaced by `[hidden]`. The gateway writes no secrets to its log, but a line may quote a URL or an
    error message of another program.
    """

    def __init__(self, secrets: Callable[[], Iterable[str]]) -> None:
        super().__init__()
        self._secrets = secrets
        self._lines: deque[bytes] = deque(maxlen=MAX_LINES)
        self._count = 0

    @property
    def first(self) -> int:
        """Number of the oldest line that is kept; the first line ever has the number 0."""
        return self._count - len(self._lines)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line of a log record. `logging` holds the handler's lock."""
        try:
            line = self._line(record)
        except Exception:  # as in other handlers, an invalid log call must not raise an error in the code that logs
            self.handleError(record)
            return
        self._lines.append(line)
        self._count += 1

    def _line(self, record: logging.LogRecord) -> bytes:
        line: dict[str, object] = {
            "at_ms": int(record.created * 1000),
            "level": record.levelname,
            "logger": record.name,
            "message": self._hide(one_line(record.getMessage()))[:MAX_CHARS],
        }
        if current_id := request_id.get():
            line["request"] = current_id
        if record.exc_info:
            text = (self.formatter or logging.Formatter()).formatException(record.exc_info)
            line["exception"] = self._hide(text)[-_MAX_EXCEPTION_CHARS:]
        return json.dumps(line).encode()

    def since(self, number: int) -> list[bytes]:
        """Return the lines from the line `number` on that are kept, as JSON, oldest first."""
        self.acquire()
        try:
            new = min(self._count - number, len(self._lines))
            return [self._lines[-place] for place in range(new, 0, -1)]
        finally:
            self.release()

    def _hide(self, text: str) -> str:
        for secret in self._secrets():
            if len(secret) >= _MIN_SECRET_CHARS:
                text = text.replace(secret, _HIDDEN)
        for pattern, replacement in _SECRETS:
            text = pattern.sub(replacement, text)
        return text
