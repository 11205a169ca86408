"""The progress bar of downloads, with a simulated clock."""

import io
import re

import pytest

from helexa.cli.model_loading_and_download_bar import DownloadBar

MB = 1_000_000


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("CI", "HF_HUB_DISABLE_PROGRESS_BARS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")


def output_during_download(stream, clock, seconds, **options):
    """Return what the terminal shows when 8 of 10 MB are downloaded, `seconds` after the start."""
    with DownloadBar("org/name", stream=stream, clock=clock, **options) as bar:
        bar.show("list", 0, 0)
        bar.show("download", 2 * MB, 10 * MB)
        clock.now += seconds
        bar.show("download", 8 * MB, 10 * MB)
        shown = stream.getvalue()
        bar.show("download", 10 * MB, 10 * MB)
    return shown


def test_download_of_less_than_half_a_second_shows_no_bar(capsys):
    stream = Terminal()
    assert output_during_download(stream, Clock(), 0.49) == ""
    assert (stream.getvalue(), capsys.readouterr().err) == ("", "")


def test_download_shows_a_progress_bar_in_a_terminal_and_then_a_summary(capsys):
    stream = Terminal()
    output_during_download(stream, Clock(), 0.5)
    for text in ("fetching org/name", "8.0 MB of 10.0 MB"):
        assert text in stream.getvalue()
    assert capsys.readouterr().err == "org/name: fetched 8.0 MB in 0.5 s, 16.0 MB/s\n"


@pytest.mark.parametrize("width", [40, 80, 120])
def test_download_progress_bar_fits_into_one_line_of_a_narrow_terminal(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    stream, clock = Terminal(), Clock()
    with DownloadBar("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", stream=stream, clock=clock) as bar:
        clock.now += 1
        for stage, done, total in (("list", 0, 0), ("download", 200 * MB, 495 * MB)):
            bar.show(stage, done, total)
            bar._bar.refresh()
        drawn = stream.getvalue()
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in drawn.split("\r")]
    assert any("200.0 MB of 495.0 MB" in line for line in lines)
    assert not any("\n" in line or len(line) > width for line in lines)


def test_progress_bar_of_a_download_of_unknown_size_shows_only_the_received_bytes(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stream, clock = Terminal(), Clock()
    with DownloadBar("org/name", stream=stream, clock=clock) as bar:
        clock.now += 1
        for done in (0, 12 * MB):
            bar.show("download", done, 0)
            bar._bar.refresh()
        drawn = stream.getvalue()
    assert "12.0 MB" in drawn
    assert "?" not in re.sub(r"\x1b\[\?", "", drawn)


def test_download_without_a_terminal_prints_a_summary_but_no_progress_bar(capsys):
    stream = io.StringIO()
    output_during_download(stream, Clock(), 60)
    assert stream.getvalue() == ""
    assert capsys.readouterr().err == "org/name: fetched 8.0 MB in 60.0 s, 133.3 kB/s\n"


@pytest.mark.parametrize("name", ["CI", "HF_HUB_DISABLE_PROGRESS_BARS"])
def test_ci_and_hugging_face_environment_variables_hide_the_download_progress_bar(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    stream = Terminal()
    output_during_download(stream, Clock(), 60)
    assert stream.getvalue() == ""


def test_download_with_the_quiet_option_prints_nothing(capsys):
    stream = Terminal()
    output_during_download(stream, Clock(), 60, quiet=True)
    assert (stream.getvalue(), capsys.readouterr().err) == ("", "")


def test_model_in_the_cache_is_not_reported_as_downloaded(capsys):
    clock = Clock()
    with DownloadBar("org/name", stream=io.StringIO(), clock=clock) as bar:
        clock.now += 60
        bar.show("download", 10 * MB, 10 * MB)
    assert capsys.readouterr().err == ""


def test_model_load_after_a_download_is_shown_but_not_counted_as_download_time(capsys):
    stream, clock = Terminal(), Clock()
    with DownloadBar("org/name", stream=stream, clock=clock) as bar:
        bar.show("download", 0, 10 * MB)
        clock.now += 2
        bar.show("download", 10 * MB, 10 * MB)
        clock.now += 60
        bar.show("weights", 1 * MB, 10 * MB)
    assert "loading org/name" in stream.getvalue()
    assert capsys.readouterr().err == "org/name: fetched 10.0 MB in 2.0 s, 5.0 MB/s\n"


def test_failed_download_prints_no_summary(capsys):
    clock = Clock()
    with pytest.raises(OSError), DownloadBar("org/name", stream=io.StringIO(), clock=clock) as bar:
        bar.show("download", 0, 10 * MB)
        clock.now += 60
        bar.show("download", MB, 10 * MB)
        raise OSError
    assert capsys.readouterr().err == ""


def test_slow_lookup_of_a_model_on_the_hub_is_shown():
    stream, clock = Terminal(), Clock()
    with DownloadBar("org/name", stream=stream, clock=clock) as bar:
        bar.show("list", 0, 0)
        clock.now += 1
        bar._late.join()
        assert "looking up org/name" in stream.getvalue()
