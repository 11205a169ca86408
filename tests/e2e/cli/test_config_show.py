"""`helexa config show`: the effective configuration, and the origin of each value."""

import json
from pathlib import Path

NODE = """port = 14000
api_key = "s3cret"

[harness.torch]
max_sequences = 5
dtype = "float32"

[[default_models]]
model_id = "a/b"
[[default_models]]
model_id = "c/d"
quant = "q4k"

[harness.torch.sources."mirror"]
endpoint = "https://user:s3cret@host/x"
"""
GATEWAY = """neurons = [{name = "n", endpoint = "http://h:1", bearer = "s3cret"}]
[gateway]
listen = "127.0.0.1:1"
[[entitlements.keys]]
key = "s3cret"
account_id = "a"
[ledger]
url = "postgresql://user:s3cret@h/d"
"""


def shown(helexa, tmp_path, server, text, *options, **variables):
    path = tmp_path / "server.toml"
    path.write_text(text)
    result = helexa("config", "show", server, "-c", str(path), "--json", *options, **variables)
    assert result.returncode == 0
    assert "s3cret" not in result.stdout + result.stderr
    rows = {row["key"]: (row["value"], row["origin"]) for row in json.loads(result.stdout)}
    return {key: (value, origin.replace(str(path), "FILE")) for key, (value, origin) in rows.items()}


def test_config_show_prints_the_origin_of_each_node_setting(helexa, tmp_path):
    variables = {"NEURON_DRAIN_SECS": "9", "NEURON_MAX_PROMPT_TOKENS": "77", "NEURON_HARNESS__TORCH__DTYPE": "auto"}
    rows = shown(helexa, tmp_path, "node", NODE, "-np", "3", **variables)
    expected = {
        "port": (14000, "FILE:1"),
        "host": ("127.0.0.1", "default"),
        "api_key": ("***", "FILE:2"),
        "drain_secs": (9.0, "NEURON_DRAIN_SECS"),
        "harness.torch.max_sequences": (3, "--max-num-seqs"),
        "harness.torch.dtype": ("auto", "NEURON_HARNESS__TORCH__DTYPE"),
        "harness.torch.context_limit.max_prompt_tokens": (77, "NEURON_MAX_PROMPT_TOKENS"),
        "harness.torch.sources.mirror.endpoint": ("https://***@host/x", "FILE:15"),
        "default_models.0.model_id": ("a/b", "FILE:9"),
        "default_models.1.model_id": ("c/d", "FILE:11"),
        "default_models.1.quant": ("q4k", "FILE:12"),
    }
    assert {key: rows[key] for key in expected} == expected


def test_config_show_prints_the_origin_of_each_gateway_setting_and_hides_secrets(helexa, tmp_path):
    rows = shown(helexa, tmp_path, "gateway", GATEWAY, CORTEX_GATEWAY__METRICS_LISTEN="127.0.0.1:9")
    expected = {
        "gateway.listen": ("127.0.0.1:1", "FILE:3"),
        "gateway.metrics_listen": ("127.0.0.1:9", "CORTEX_GATEWAY__METRICS_LISTEN"),
        "gateway.drain_secs": (5.0, "default"),
        "entitlements.keys.0.key": ("***", "FILE:5"),
        "ledger.url": ("***", "FILE:8"),
        "neurons.0.bearer": ("***", "FILE"),
    }
    assert {key: rows[key] for key in expected} == expected


def test_list_in_an_environment_variable_replaces_the_list_in_the_file(helexa, tmp_path):
    rows = shown(helexa, tmp_path, "node", NODE, NEURON_DEFAULT_MODELS='[{model_id = "x/y"}]')
    assert rows["default_models.0.model_id"] == ("x/y", "NEURON_DEFAULT_MODELS")
    assert "default_models.1.model_id" not in rows


def test_text_output_shows_origins_only_with_option_origin(helexa, tmp_path):
    (tmp_path / "neuron.toml").write_text("port = 14000\n")
    arguments = ("config", "show", "node", "-c", str(tmp_path / "neuron.toml"))
    assert "port = 14000" in helexa(*arguments).stdout.splitlines()
    (line,) = [line for line in helexa(*arguments, "--origin").stdout.splitlines() if line.startswith("port = ")]
    assert line.split("# ")[1] == f"{tmp_path / 'neuron.toml'}:1"


def test_config_show_without_a_server_name_prints_each_server_with_a_configuration_file(helexa, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if not any(Path(file).exists() for file in ("/etc/neuron/neuron.toml", "/etc/cortex/cortex.toml")):
        result = helexa("config", "show")
        assert (result.returncode, result.stdout) == (2, "")
        assert "looked for neuron.toml, /etc/neuron/neuron.toml, cortex.toml" in result.stderr
    (tmp_path / "neuron.toml").write_text("port = 14000\n")
    (tmp_path / "cortex.toml").write_text('[gateway]\nlisten = "127.0.0.1:1"\n')
    result = helexa("config", "show", "--origin")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line for line in lines if line[:1] == ["#"]] == [
        ["#", "node:", "neuron.toml"],
        ["#", "gateway:", "cortex.toml"],
    ]
    assert ["port", "=", "14000", "#", "neuron.toml:1"] in lines
    assert ["gateway.listen", "=", '"127.0.0.1:1"', "#", "cortex.toml:2"] in lines
    assert set(json.loads(helexa("config", "show", "--json").stdout)) == {"node", "gateway"}
    result = helexa("config", "show", "-c", "other.toml")
    assert (result.returncode, "`helexa config show gateway -c other.toml`" in result.stderr) == (2, True)


def test_invalid_configuration_ends_config_show_with_exit_code_78(helexa, tmp_path):
    (tmp_path / "neuron.toml").write_text("prot = 14000\n")
    result = helexa("config", "show", "node", "-c", str(tmp_path / "neuron.toml"))
    assert (result.returncode, result.stdout) == (78, "")
    assert "did you mean 'port'?" in result.stderr
