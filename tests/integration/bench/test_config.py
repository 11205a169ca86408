"""The configuration file `helexa-bench.toml` and the `BENCH_` environment variables."""

from pathlib import Path

import pytest

from helexa.bench.config import load
from helexa.bench.sweep_and_warm_up import sweep_scenarios
from helexa.core.errors import ConfigError

EXAMPLE = Path(__file__).parents[3] / "docs" / "bench.example.toml"


def written(folder: Path, text: str) -> Path:
    path = folder / "helexa-bench.toml"
    path.write_text(text)
    return path


def test_short_configuration_gets_the_documented_defaults(tmp_path: Path) -> None:
    settings = load(written(tmp_path, '[[targets]]\nname = "n1"\nendpoint = "http://n1:13131/v1/"\n'))
    assert (settings.bench.sweep_interval_secs, settings.bench.samples_per_version) == (1800, 5)
    assert settings.scenarios.prompt_sizes == [128, 4096]
    assert (settings.api.enabled, settings.api.listen.port) == (True, 13132)
    assert (settings.targets[0].kind, settings.targets[0].endpoint) == ("neuron", "http://n1:13131")


def test_environment_variables_override_the_bench_configuration_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCH_BENCH__SAMPLES_PER_VERSION", "9")
    monkeypatch.setenv("BENCH_API__LISTEN", "[::1]:99")
    settings = load(written(tmp_path, "[bench]\nsamples_per_version = 2\n"))
    assert settings.bench.samples_per_version == 9
    assert str(settings.api.listen) == "[::1]:99"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[bench]\nsweep_intervall_secs = 3\n", "did you mean 'sweep_interval_secs'"),
        ("[api]\nlisten = '13132'\n", "is not an address"),
        ("[[targets]]\nname = 'a'\nendpoint = 'n1:13131'\n", "is not a URL"),
        ("[[targets]]\nname = 'a'\nendpoint = 'http://u:secret@n1'\n", "user name or password"),
        ("[[targets]]\nname = 'a/b'\nendpoint = 'http://n1'\n", "is not a valid name"),
        ("[[targets]]\nname = 'a'\nendpoint = 'http://n1'\n" * 2, "two targets are named 'a'"),
        ("[scenarios]\nprompt_sizes = [0]\n", "greater than or equal to 1"),
        (
            "[[scenarios.capability_probes]]\nname = 'p'\nprompt = 'x'\nexpect = ['(']\n",
            "is not a valid regular expression: ",
        ),
    ],
)
def test_error_for_an_invalid_bench_setting_explains_what_is_wrong(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, text))
    assert complaint in str(caught.value)
    assert "secret" not in str(caught.value)


def test_default_database_is_next_to_the_configuration(tmp_path: Path) -> None:
    assert load(written(tmp_path, '[bench]\ndb_path = "b.sqlite"\n')).bench.db_path == tmp_path / "b.sqlite"


def test_example_file_is_valid_and_lists_every_scenario() -> None:
    kinds = {scenario.key.kind for scenario in sweep_scenarios(load(EXAMPLE).scenarios)}
    assert kinds == {
        *("single", "decode", "concurrency", "rate", "agentic", "mixed"),
        *("cancel", "correctness", "capability", "image"),
    }


def test_scenario_names_are_unique() -> None:
    names = [scenario.key.name for scenario in sweep_scenarios(load(EXAMPLE).scenarios)]
    assert len(names) == len(set(names))
