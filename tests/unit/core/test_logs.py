"""Log lines as text and as JSON."""

import ast
import json
import logging
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from helexa.core.errors import ConfigError
from helexa.core.logs import JsonLines, TextLines, configure, quoted, request_id, tell


def record(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    (record,) = caplog.records
    return record


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "helexa.test")
    token = request_id.set("r-1")
    yield
    request_id.reset(token)


LOG = logging.getLogger("helexa.test")


def test_log_fields_are_members_in_json_and_key_value_pairs_in_text(caplog: pytest.LogCaptureFixture) -> None:
    tell(LOG, logging.WARNING, "refused", path="/a b\n", status=503, code=None, retry=True, detail="too busy")
    text = TextLines().format(record(caplog))
    assert text.endswith(
        "WARNING helexa.test: refused path='/a b\\n' status=503 code=None retry=True detail='too busy' request=r-1"
    )
    line = json.loads(JsonLines().format(record(caplog)))
    assert line["time"].endswith("+00:00")
    del line["time"], line["message"]
    assert line == {
        "level": "WARNING",
        "logger": "helexa.test",
        "event": "refused",
        "path": "/a b\n",
        "status": 503,
        "code": None,
        "retry": True,
        "detail": "too busy",
        "request": "r-1",
    }


def test_line_breaks_in_a_log_message_are_escaped(caplog: pytest.LogCaptureFixture) -> None:
    LOG.info("loading model=%s", "a\n2026-01-01 00:00:00 ERROR helexa.cortex: forged\x1b[2J\u202e")
    text = TextLines().format(record(caplog))
    assert text.endswith(r"model=a\n2026-01-01 00:00:00 ERROR helexa.cortex: forged\x1b[2J\u202e request=r-1")


def test_lines_of_a_traceback_are_indented_so_that_they_cannot_forge_log_lines() -> None:
    try:
        raise ValueError("x\n2026-11-28 03:00:00,000 INFO helexa: forged\x1b[31m")
    except ValueError:
        record = LOG.makeRecord(LOG.name, logging.ERROR, "", 0, "failed", (), sys.exc_info())
    first, *others = TextLines().format(record).split("\n")
    assert first.endswith("failed request=r-1")
    assert all(line.startswith("  ") and line.isprintable() for line in others)


def test_log_fields_cannot_replace_level_time_message_or_request(caplog: pytest.LogCaptureFixture) -> None:
    tell(LOG, logging.INFO, "refused", level="none", request="other", time="never", message="!")
    line = json.loads(JsonLines().format(record(caplog)))
    assert (line["level"], line["request"], line["message"][:7]) == ("INFO", "r-1", "refused")
    assert line["time"] != "never"


def test_traceback_in_a_json_log_stays_on_one_line() -> None:
    try:
        raise ValueError("\ud800")
    except ValueError:
        error_record = LOG.makeRecord(LOG.name, logging.ERROR, __file__, 1, "it broke: %s", ("x",), sys.exc_info())
    text = JsonLines().format(error_record)
    assert "\n" not in text
    line = json.loads(text)
    assert line["message"] == "it broke: x"
    assert "ValueError" in line["exception"]


def test_invalid_log_variable_is_named_in_the_error() -> None:
    for environ, message in (
        ({"HELEXA_LOG": "loud"}, "HELEXA_LOG is 'LOUD'"),
        ({"HELEXA_LOG": "info,helexa.core=loud"}, "HELEXA_LOG is 'helexa.core=LOUD'"),
        ({"HELEXA_LOG_FORMAT": "x"}, "text, json"),
    ):
        with pytest.raises(ConfigError, match=message):
            configure("text", environ=environ)


def test_log_variables_override_the_arguments_of_configure() -> None:
    script = (
        "import logging; from helexa.core.logs import configure\n"
        "configure('text', 'INFO', {'HELEXA_LOG': 'debug', 'HELEXA_LOG_FORMAT': 'json'})\n"
        "logging.getLogger('a').debug('b')"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(run.stderr)["message"] == "b"


def test_log_variable_sets_levels_of_single_loggers() -> None:
    script = (
        "import logging; from helexa.core.logs import configure\n"
        "configure('text', 'INFO', {'HELEXA_LOG': 'warning, helexa.cortex=debug,helexa.cortex.fleet=error'})\n"
        "for name in ('helexa.core', 'helexa.cortex.app', 'helexa.cortex.fleet.poller'):\n"
        "    print(name, logging.getLogger(name).getEffectiveLevel())"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [
        "helexa.core", "30", "helexa.cortex.app", "10", "helexa.cortex.fleet.poller", "40"
    ]  # fmt: skip


def test_log_variable_without_a_global_level_keeps_the_configured_level() -> None:
    script = (
        "import logging; from helexa.core.logs import configure\n"
        "configure('text', 'error', {'HELEXA_LOG': 'helexa.cortex=debug'})\n"
        "print(logging.getLogger().level, logging.getLogger('helexa.cortex').level)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["40", "10"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("/srv/models[1]/a~b.gguf", "/srv/models[1]/a~b.gguf"),
        ("", "''"),
        ("connection refused", "'connection refused'"),
        ("model 'x'; a=b", "\"model 'x'; a=b\""),
        ("a=b", "'a=b'"),
        ("two\nlines", r"'two\nlines'"),
        (None, "None"),
        (OSError("no space"), "'no space'"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_log_field_with_spaces_quotes_or_separators_is_quoted(value: object, text: str) -> None:
    assert quoted(value) == text


@pytest.mark.parametrize(
    ("call", "is_valid"),
    [
        ('log.info("reload requested by a signal")', True),
        ('log.warning("node is down node=%s error=%s; polls go on", name, quoted(error))', True),
        ('self._log.info("listening url=http://%s:%d", host, port)', True),
        ('log.info("node cordoned node=%s" if cordoned else "node uncordoned node=%s", name)', True),
        ('log.log(level, "device ignored device=cuda:%d", index)', True),
        ('log.warning("%s", exposure)', True),
        ('tell(log, logging.INFO, "sweep done", measured=3)', True),
        ("math.log(x)", True),
        ('log.info("node is down: node=%s", name)', False),
        ('log.info("node is down node=%s: %s", name, error)', False),
        ('log.info("node %s is down", name)', False),
        ('log.info("Node is down node=%s", name)', False),
        ('log.info("node is down node=%s.", name)', False),
        ('log.info("node is down Node=%s", name)', False),
        ('log.info("node cordoned node=%s" if cordoned else "%s uncordoned", name)', False),
        ('log.log(level, "%s: %s", address, error)', False),
        ('log.info(f"node is down node={name}")', False),
        ('logging.getLogger("helexa").error("%s failed", name)', False),
        ('tell(log, logging.INFO, "sweep done: all", measured=3)', False),
    ],
)
def test_prose_check_reports_log_calls_that_are_not_in_the_required_form(call: str, is_valid: bool) -> None:
    check = runpy.run_path(str(Path(__file__).parents[3] / "tools" / "check_prose.py"))["log_lines"]
    assert (not list(check(ast.parse(call), "module.py"))) == is_valid
