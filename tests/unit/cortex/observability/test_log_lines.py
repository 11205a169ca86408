"""The newest lines of the log in memory."""

import logging
import sys

import orjson
import pytest

from helexa.core.logs import LogLines


def record(message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("helexa.test", logging.INFO, "file", 1, message, arguments, None)


def test_log_call_with_wrong_arguments_raises_nothing_in_its_caller(capsys: pytest.CaptureFixture[str]) -> None:
    lines = LogLines(lambda: ())
    lines.handle(record("%d", "x"))
    lines.handle(record("good"))
    assert [orjson.loads(line)["message"] for line in lines.since(0)] == ["good"]
    assert "Logging error" in capsys.readouterr().err


def test_long_log_line_is_searched_for_secrets_in_linear_time() -> None:
    """A quadratic search of 300,000 characters would take half an hour."""
    lines = LogLines(lambda: ())
    lines.handle(record("x" * 300_000 + " my_password=hunter22"))
    assert len(lines.since(0)) == 1
    lines.handle(record("the api-key: abcdefghij, next"))
    assert orjson.loads(lines.since(1)[0])["message"] == "the api-key: [hidden], next"
    assert sys.getsizeof(lines.since(0)[0]) < 4000
