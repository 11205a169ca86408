"""Usage and configuration errors of the `neuron` command: one message on stderr, no traceback."""

import os
import subprocess
import sys

import pytest

from helexa.neuron import cli


@pytest.mark.parametrize(
    ("arguments", "environment", "code", "complaint"),
    [
        (["--port", "70000"], {}, 2, "65535"),
        (["serve", "--port", "-1"], {}, 2, "Must be >= 1"),
        (["serve", "--log-format", "xml"], {}, 2, "json"),
        (["smoke", "--ranks", "1"], {}, 2, "Must be >= 2"),
        (["--tp-smoke", "--tp-size", "1"], {}, 2, "Must be >= 2"),
        ([], {"HELEXA_LOG_FORMAT": "xml"}, 78, "HELEXA_LOG_FORMAT is 'xml', expected one of text, json"),
        ([], {"HELEXA_LOG": "loud"}, 78, "HELEXA_LOG is 'LOUD', expected one of CRITICAL"),
    ],
)
def test_usage_error_of_the_node_command_prints_a_message_without_traceback(
    arguments: list[str], environment: dict[str, str], code: int, complaint: str
) -> None:
    command = [sys.executable, "-m", "helexa.neuron", *arguments]
    run = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == code
    assert complaint in run.stderr
    assert "Traceback" not in run.stderr


def test_former_option_tp_smoke_still_runs_the_smoke_test(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[dict[str, object]] = []
    monkeypatch.setattr(cli, "smoke", lambda **options: runs.append(options))
    cli.app(["--tp-smoke", "--tp-size", "3"], exit_on_error=False, result_action="return_value")
    assert runs == [{"ranks": 3, "config": None}]
