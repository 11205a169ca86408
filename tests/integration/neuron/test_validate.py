"""`neuron validate`: a real load on this machine, and failures."""

import json
from pathlib import Path

import pytest

from helexa.core.node_reports import Discovery
from helexa.neuron import doctor_machine
from helexa.neuron.cli import app
from helexa.neuron.hardware import machine_description


def validate(*arguments: str) -> int:
    try:
        app(["validate", *arguments], result_action="return_value")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_validate_command_loads_a_model_and_generates_tokens(
    smollm2_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert validate(str(smollm2_gguf), "--device", "cpu", "--max-model-len", "128", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    texts = {check["topic"]: check["text"] for check in report["checks"]}
    assert "on cpu" in texts["load"]
    assert texts["tokens"].startswith("generated 16 tokens")
    assert "MB of weights" in texts["memory"]


def test_validate_command_exits_with_code_1_if_the_load_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert validate(str(tmp_path / "none.gguf"), "--device", "cpu") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("ERROR load: ")
    assert lines[-1] == "status=failed"


def test_validate_command_reports_a_driver_mismatch_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = "the driver was updated while it was in use (kernel 595.1, library 595.2); reboot"
    facts = Discovery(hostname="here", os="Linux", cuda_unavailable_reason=reason)
    for module in (doctor_machine, machine_description):
        monkeypatch.setattr(module, "discover", lambda: facts)
    assert validate("helexa/small") == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("ERROR")] == [
        f"ERROR device: the NVIDIA driver does not work: {reason}"
    ]
    assert lines[-1] == "status=failed"
    assert not any("load:" in line for line in lines)
