"""Configuration from files and the environment, and error messages for mistakes."""

from pathlib import Path

import pytest

from helexa.acp.config import ConfigError, Endpoint, config_path, load, parse

TWO_ENDPOINTS = """
default_endpoint = "cloud"
default_mode = "acceptEdits"
allow_fetch = true

[[endpoints]]
name = "home"
base_url = "http://gpu:31313/v1/"
default_model = "helexa/small"
max_tokens = 4096
context_window = 32768

[[endpoints]]
name = "cloud"
base_url = "https://api.example.com"
wire_api = "anthropic-messages"
api_key_env = "CLOUD_KEY"
tool_calls = "native"
headers = { "x-team" = "blue" }
"""


@pytest.fixture
def home(tmp_path):
    """Return an environment, and the path of its configuration file, which does not exist yet."""
    file = tmp_path / "config/helexa-acp/config.toml"
    file.parent.mkdir(parents=True)
    return {"XDG_CONFIG_HOME": str(tmp_path / "config"), "HOME": str(tmp_path)}, file


def test_settings_and_endpoints_are_read_from_the_configuration_file(home):
    environ, file = home
    file.write_text(TWO_ENDPOINTS)
    settings = load(environ | {"CLOUD_KEY": "sk-1"})
    assert settings.default_endpoint == "cloud"
    assert (settings.default_mode, settings.allow_fetch) == ("acceptEdits", True)
    assert settings.endpoints == (
        Endpoint(
            name="home",
            base_url="http://gpu:31313/v1",
            default_model="helexa/small",
            max_tokens=4096,
            context_window=32768,
        ),
        Endpoint(
            name="cloud",
            base_url="https://api.example.com/v1",
            wire_api="anthropic-messages",
            api_key="sk-1",
            tool_calls="native",
            headers={"x-team": "blue"},
        ),
    )
    assert settings.data_dir == Path(environ["HOME"]) / ".local/share/helexa-acp"


def test_api_key_in_the_file_overrides_its_variable_and_repr_hides_keys():
    text = '[[endpoints]]\nname="a"\nbase_url="http://a/v1"\napi_key="literal"\napi_key_env="KEY"\nheaders={k="hush"}'
    settings = parse(text, "f", {"KEY": "env"})
    assert settings.endpoints[0].api_key == "literal"
    assert "literal" not in repr(settings)
    assert "hush" not in repr(settings)


def test_endpoint_without_key_is_skipped_with_a_warning():
    settings = parse(TWO_ENDPOINTS.replace('default_endpoint = "cloud"', ""), "f", {})
    assert [endpoint.name for endpoint in settings.endpoints] == ["home"]
    assert settings.default_endpoint == "home"
    assert "CLOUD_KEY" in settings.warnings[0]


def test_endpoints_are_read_from_the_environment_if_there_is_no_file(home):
    environ, _ = home
    plain = load(environ)
    assert plain.endpoints == (
        Endpoint(name="default", base_url="http://localhost:31313/v1", default_model="helexa/small"),
    )
    configured = load(
        environ
        | {
            "HELEXA_ACP_BASE_URL": "http://gpu:8000",
            "HELEXA_ACP_MODEL": "qwen3:8b",
            "HELEXA_ACP_API_KEY": "k",
            "HELEXA_ACP_WIRE_API": "auto",
            "HELEXA_ACP_MAX_TOKENS": "100",
            "HELEXA_ACP_CONTEXT_WINDOW": "2000",
            "HELEXA_ACP_MODE": "plan",
            "HELEXA_ACP_ALLOW_FETCH": "1",
            "HELEXA_ACP_MAX_ROUNDS": "40",
            "XDG_DATA_HOME": "/data",
        }
    )
    (endpoint,) = configured.endpoints
    assert (endpoint.base_url, endpoint.default_model, endpoint.api_key) == ("http://gpu:8000/v1", "qwen3:8b", "k")
    assert (endpoint.wire_api, endpoint.max_tokens, endpoint.context_window) == ("auto", 100, 2000)
    assert (configured.default_mode, configured.allow_fetch, configured.data_dir) == (
        "plan",
        True,
        Path("/data/helexa-acp"),
    )
    assert configured.max_rounds == 40


def test_configuration_path_is_found_from_the_environment_variables():
    assert config_path({"HELEXA_ACP_CONFIG_PATH": "/x.toml", "XDG_CONFIG_HOME": "/c"}) == Path("/x.toml")
    assert config_path({"XDG_CONFIG_HOME": "/c", "HOME": "/h"}) == Path("/c/helexa-acp/config.toml")
    assert config_path({"HOME": "/h"}) == Path("/h/.config/helexa-acp/config.toml")


ONE_ENDPOINT = '[[endpoints]]\nname = "a"\nbase_url = "http://a/v1"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no [[endpoints]]"),
        ("x = ", "file: "),
        ("endpoints = 3", "Expected `array`"),
        ("endpoints = [3]", "endpoints[0]"),
        ("defualt_endpoint = 'a'\n" + ONE_ENDPOINT, "did you mean 'default_endpoint'?"),
        (ONE_ENDPOINT + "base_ulr = 'x'", "unknown key 'endpoints[0].base_ulr'; did you mean 'base_url'?"),
        (ONE_ENDPOINT + "url = 'x'", "unknown key 'endpoints[0].url'; did you mean 'base_url'?"),
        (ONE_ENDPOINT + "model = 'x'", "unknown key 'endpoints[0].model'; did you mean 'default_model'?"),
        (ONE_ENDPOINT + "key = 'x'", "unknown key 'endpoints[0].key'; did you mean 'api_key'?"),
        (ONE_ENDPOINT + "color = 'x'", "unknown key 'endpoints[0].color'; known names: name, base_url, wire_api, "),
        (ONE_ENDPOINT + "wire_api = 'openai'", "did you mean 'openai-chat'?"),
        (ONE_ENDPOINT + "wire_api = 'x'", "known names: auto, openai-chat, openai-responses, anthropic-messages"),
        (ONE_ENDPOINT + "tool_calls = 'no'", "tool_calls"),
        (ONE_ENDPOINT + "max_tokens = 0", "max_tokens is 0; set at least 1"),
        ("max_rounds = 0\n" + ONE_ENDPOINT, "max_rounds is 0; set at least 1"),
        (ONE_ENDPOINT + "context_window = 'big'", "context_window"),
        (ONE_ENDPOINT + ONE_ENDPOINT, "two endpoints are called 'a'"),
        ("default_endpoint = 'b'\n" + ONE_ENDPOINT, "default_endpoint: unknown value 'b'; known names: a"),
        ("default_mode = 'bypassPermission'\n" + ONE_ENDPOINT, "did you mean 'bypassPermissions'?"),
        ("system_prompt_path = '/nowhere'\n" + ONE_ENDPOINT, "/nowhere: no such file"),
        ('[[endpoints]]\nbase_url = "http://a/v1"', "name"),
        ('[[endpoints]]\nname = "a:b"\nbase_url = "http://a/v1"', "must not contain ':'"),
        ('[[endpoints]]\nname = " "\nbase_url = "http://a/v1"', "not be empty"),
        ('[[endpoints]]\nname = "a"\nbase_url = "ftp://a/v1"', "not an http(s) URL: 'ftp://a/v1'"),
        ('[[endpoints]]\nname = "a"\nbase_url = "http://a:x/v1"', "not an http(s) URL"),
        (
            ONE_ENDPOINT + "api_key_env = 'NO_SUCH_KEY'",
            "no endpoint can be used: 'a' needs the environment variable NO_SUCH_KEY",
        ),
    ],
)
def test_error_for_an_invalid_agent_configuration_names_the_mistake(text, message):
    with pytest.raises(ConfigError) as error:
        parse(text, "file", {})
    assert message in str(error.value)
    assert str(error.value).startswith("file: ")


@pytest.mark.parametrize(
    "secret", ['base_url = "http://me:hush@a/v1"', 'base_url = "http://a/v1"\napi_key = "hush\\n"']
)
def test_secret_in_a_url_or_malformed_key_is_rejected_and_not_repeated_in_the_error(secret):
    with pytest.raises(ConfigError) as error:
        parse(f'[[endpoints]]\nname = "a"\n{secret}', "file", {})
    assert "hush" not in str(error.value)


def test_default_endpoint_whose_key_is_missing_is_an_error():
    with pytest.raises(ConfigError, match="'cloud' cannot be used: 'cloud' needs the environment variable CLOUD_KEY"):
        parse(TWO_ENDPOINTS, "file", {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HELEXA_ACP_MAX_TOKENS", "many"),
        ("HELEXA_ACP_CONTEXT_WINDOW", "-1"),
        ("HELEXA_ACP_CONTEXT_WINDOW", "0"),
        ("HELEXA_ACP_WIRE_API", "grpc"),
        ("HELEXA_ACP_MODE", "yolo"),
        ("HELEXA_ACP_BASE_URL", "gpu"),
        ("HELEXA_ACP_SYSTEM_PROMPT_PATH", "/nowhere"),
        ("HELEXA_ACP_CONFIG_PATH", "/nowhere"),
        ("HELEXA_ACP_API_KEY", "kéy"),
    ],
)
def test_errors_in_environment_variables_name_the_variable(home, name, value):
    with pytest.raises(ConfigError, match=name):
        load(home[0] | {name: value})


def test_unreadable_configuration_file_is_an_error(home):
    environ, file = home
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(environ)
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigError, match=str(file)):
        load(environ)
