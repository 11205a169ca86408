"""Configuration of `helexa-acp`, from a TOML file or environment variables."""

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, field

WireApi = Literal["auto", "openai-chat", "openai-responses", "anthropic-messages"]
ToolCalls = Literal["auto", "native", "text"]
Mode = Literal["default", "acceptEdits", "plan", "bypassPermissions"]

DEFAULT_BASE_URL = "http://localhost:31313/v1"
DEFAULT_MODEL = "helexa/small"
_MAX_LISTED_NAMES = 20


class ConfigError(Exception):
    """The configuration of helexa-acp is invalid.

    The message names the file and the key, and says how to correct the value.
    """


class Endpoint(Struct, frozen=True, kw_only=True):
    """A configured server with an LLM API."""

    name: str  # endpoint name that users write in `endpoint:model`. It is not empty and has no colon.
    base_url: str  # URL including `/v1`, without trailing slash
    # API format of the endpoint. With `auto`, the format is detected by test requests.
    wire_api: WireApi = "openai-chat"
    default_model: str | None = None  # model of new sessions, or None for the first model that the endpoint lists
    api_key: str | None = None  # API key; never shown, logged or saved
    max_tokens: int | None = None  # maximum tokens of one response, or None for the agent's default
    context_window: int | None = None  # context size in tokens. None means the size that the endpoint reports.
    # How the model calls tools. `native` uses the API's tool calls. With `text`, the model writes calls between markers
    # in its text. `auto` is native until the endpoint rejects tools.
    tool_calls: ToolCalls = "auto"
    headers: dict[str, str] = {}  # additional headers of every request; never shown, logged or saved

    def __repr__(self) -> str:
        return f"Endpoint({self.name!r}, {self.base_url!r}, {self.wire_api!r})"


class Settings(Struct, frozen=True, kw_only=True):
    """The configuration of `helexa-acp`."""

    endpoints: tuple[Endpoint, ...]  # at least one endpoint; names are unique
    default_endpoint: str  # name of the endpoint that new sessions use
    # File that replaces the built-in system prompt. `{cwd}` in the file is replaced by the session's folder.
    system_prompt_path: Path | None = None
    default_mode: Mode = "default"  # permission mode of sessions in projects for which no mode was saved
    allow_fetch: bool = False  # whether the model may fetch web pages
    max_rounds: int = 25  # maximum rounds of one turn. A round is a response of the model with its tool calls.
    # folder that contains the saved sessions, preferences and plans
    data_dir: Path = field(default_factory=lambda: Path.home() / ".local/share/helexa-acp")
    warnings: tuple[str, ...] = ()  # problems of the configuration, shown in the log and by the command `/status`


class _EndpointTable(Struct, kw_only=True):
    name: str
    base_url: str
    wire_api: str = "openai-chat"
    default_model: str | None = None
    api_key: str | None = None
    api_key_env: str | None = None
    max_tokens: int | None = None
    context_window: int | None = None
    tool_calls: str = "auto"
    headers: dict[str, str] = {}


class _File(Struct, kw_only=True):
    endpoints: list[_EndpointTable] = []
    default_endpoint: str | None = None
    system_prompt_path: str | None = None
    default_mode: str = "default"
    allow_fetch: bool = False
    max_rounds: int = 25


def agent_version() -> str:
    """Return helexa-acp's version from the package's metadata, or "0" if unknown."""
    try:
        return version("helexa")
    except PackageNotFoundError:
        return "0"


def config_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path of helexa-acp's `config.toml`, whether the file exists or not."""
    if configured_path := environ.get("HELEXA_ACP_CONFIG_PATH"):
        return Path(configured_path).expanduser()
    home = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or Path.home()) / ".config"
    return Path(home) / "helexa-acp" / "config.toml"


def _data_dir(environ: Mapping[str, str]) -> Path:
    home = environ.get("XDG_DATA_HOME") or Path(environ.get("HOME") or Path.home()) / ".local/share"
    return Path(home) / "helexa-acp"


def load(environ: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings from `config.toml`; if it is missing, from the environment.

    Raises:
        ConfigError: the configuration is invalid, or the file that HELEXA_ACP_CONFIG_PATH names is missing.
    """
    path = config_path(environ)
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        if environ.get("HELEXA_ACP_CONFIG_PATH"):
            raise ConfigError(f"HELEXA_ACP_CONFIG_PATH: {path}: no such file; correct or unset the variable") from None
        return _from_environment(environ)
    except IsADirectoryError:
        raise ConfigError(
            f"{path}: is a folder, but must be a TOML file; rename the folder or set HELEXA_ACP_CONFIG_PATH"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; make the file readable for this user") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: the file is not UTF-8 text; save the file as UTF-8") from None
    return parse(text, str(path), environ)


def parse(text: str, origin: str, environ: Mapping[str, str]) -> Settings:
    """Parse the text of helexa-acp's `config.toml` and return the settings.

    `origin` is the file name for error messages. `environ` contains the API keys that `api_key_env` names.

    Raises:
        ConfigError: the configuration is invalid.
    """
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{origin}: invalid TOML: {error}; correct the syntax") from None
    _check_keys(tree, _File, origin, "")
    tables = tree.get("endpoints")
    for index, table in enumerate(tables if isinstance(tables, list) else ()):
        _check_keys(table, _EndpointTable, origin, f"endpoints[{index}].")
    try:
        file = msgspec.convert(tree, _File)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {str(error).replace('$.', '')}; correct the value") from None
    if file.max_rounds < 1:
        raise ConfigError(f"{origin}: max_rounds is {file.max_rounds}; set at least 1")
    if not file.endpoints:
        raise ConfigError(f"{origin}: no [[endpoints]] are configured; add one with a name and a base_url")
    endpoints: dict[str, Endpoint] = {}
    skipped: dict[str, str] = {}
    for table in file.endpoints:
        if table.name in endpoints or table.name in skipped:
            raise ConfigError(f"{origin}: two endpoints are called '{table.name}'; rename one of them")
        endpoint = _endpoint(table, origin, environ)
        if isinstance(endpoint, Endpoint):
            endpoints[table.name] = endpoint
        else:
            skipped[table.name] = endpoint
    if not endpoints:
        raise ConfigError(f"{origin}: no endpoint can be used: {'; '.join(skipped.values())}")
    default = file.default_endpoint or next(iter(endpoints))
    if default in skipped:
        raise ConfigError(f"{origin}: default_endpoint '{default}' cannot be used: {skipped[default]}")
    if default not in endpoints:
        raise ConfigError(f"{origin}: default_endpoint: {_no_such(default, endpoints)}")
    return Settings(
        endpoints=tuple(endpoints.values()),
        default_endpoint=default,
        system_prompt_path=_prompt_path(file.system_prompt_path, f"{origin}: system_prompt_path"),
        default_mode=_choice(file.default_mode, Mode, f"{origin}: default_mode"),
        allow_fetch=file.allow_fetch,
        max_rounds=file.max_rounds,
        data_dir=_data_dir(environ),
        warnings=tuple(f"endpoint {reason}; the endpoint is skipped" for reason in skipped.values()),
    )


def _from_environment(environ: Mapping[str, str]) -> Settings:
    def number(name: str) -> int | None:
        text = environ.get(name)
        if not text:
            return None
        if not text.isascii() or not text.isdigit() or int(text) == 0:
            raise ConfigError(f"{name}: not a positive integer: '{text}'; write a number such as 8192")
        return int(text)

    prompt = environ.get("HELEXA_ACP_SYSTEM_PROMPT_PATH")
    _check_headers({"HELEXA_ACP_API_KEY": environ.get("HELEXA_ACP_API_KEY") or ""}, "environment")
    endpoint = Endpoint(
        name="default",
        base_url=_base_url(environ.get("HELEXA_ACP_BASE_URL") or DEFAULT_BASE_URL, "HELEXA_ACP_BASE_URL"),
        wire_api=_choice(environ.get("HELEXA_ACP_WIRE_API") or "openai-chat", WireApi, "HELEXA_ACP_WIRE_API"),
        default_model=environ.get("HELEXA_ACP_MODEL") or DEFAULT_MODEL,
        api_key=environ.get("HELEXA_ACP_API_KEY") or None,
        max_tokens=number("HELEXA_ACP_MAX_TOKENS"),
        context_window=number("HELEXA_ACP_CONTEXT_WINDOW"),
    )
    return Settings(
        endpoints=(endpoint,),
        default_endpoint=endpoint.name,
        system_prompt_path=_prompt_path(prompt, "HELEXA_ACP_SYSTEM_PROMPT_PATH"),
        default_mode=_choice(environ.get("HELEXA_ACP_MODE") or "default", Mode, "HELEXA_ACP_MODE"),
        allow_fetch=_choice(environ.get("HELEXA_ACP_ALLOW_FETCH") or "0", Literal["0", "1"], "HELEXA_ACP_ALLOW_FETCH")
        == "1",
        max_rounds=number("HELEXA_ACP_MAX_ROUNDS") or 25,
        data_dir=_data_dir(environ),
    )


def _endpoint(table: _EndpointTable, origin: str, environ: Mapping[str, str]) -> Endpoint | str:
    """Return the endpoint in a `[[endpoints]]` table, or why the endpoint is skipped.

    An endpoint is skipped if `api_key_env` names an environment variable that is not set.
    """
    where = f"{origin}: endpoint '{table.name}'"
    if not table.name.strip() or ":" in table.name:
        raise ConfigError(f"{where}: a name must not be empty and must not contain ':'; rename the endpoint")
    for key in ("max_tokens", "context_window"):
        value = getattr(table, key)
        if value is not None and value < 1:
            raise ConfigError(f"{where}: {key} is {value}; set at least 1")
    key = table.api_key
    if not key and table.api_key_env:
        key = environ.get(table.api_key_env)
        if not key:
            return f"'{table.name}' needs the environment variable {table.api_key_env}, which is not set"
    _check_headers({"api_key": key or "", **table.headers}, where)
    return Endpoint(
        name=table.name,
        base_url=_base_url(table.base_url, f"{where}: base_url"),
        wire_api=_choice(table.wire_api, WireApi, f"{where}: wire_api"),
        default_model=table.default_model or None,
        api_key=key or None,
        max_tokens=table.max_tokens,
        context_window=table.context_window,
        tool_calls=_choice(table.tool_calls, ToolCalls, f"{where}: tool_calls"),
        headers=table.headers,
    )


def _base_url(text: str, where: str) -> str:
    try:
        url = urlsplit(text.strip())
        valid = url.scheme in ("http", "https") and url.hostname and (url.port or 1)
        secret = url.username or url.password
    except ValueError:
        valid, secret = False, None
    if secret:
        raise ConfigError(
            f"{where}: a URL must not contain credentials, because users see the URL; use api_key or headers"
        )
    if not valid:
        raise ConfigError(f"{where}: not an http(s) URL: '{text}'; write a URL such as {DEFAULT_BASE_URL}")
    bare = text.strip().rstrip("/")
    # Append /v1 to a URL without a path, because no known server has its API at the root.
    return bare if urlsplit(bare).path else f"{bare}/v1"


def _check_headers(values: Mapping[str, str], where: str) -> None:
    for name, value in values.items():
        if not (name + value).isascii() or not (name + value).isprintable():
            raise ConfigError(
                f"{where}: {name} contains characters that HTTP headers cannot contain; use printable ASCII"
            )


def _choice(value: str, literal: Any, where: str) -> Any:
    known = get_args(literal)
    if value not in known:
        raise ConfigError(f"{where}: {_no_such(value, known)}")
    return value


def _prompt_path(text: str | None, where: str) -> Path | None:
    if not text:
        return None
    path = Path(text).expanduser()
    if not path.is_file():
        raise ConfigError(f"{where}: {path}: no such file; correct the path")
    return path


def _check_keys(table: Any, schema: type[Struct], origin: str, prefix: str) -> None:
    known = schema.__struct_fields__
    for key in table if isinstance(table, dict) else ():
        if key not in known:
            raise ConfigError(f"{origin}: unknown key '{prefix}{key}'; {name_hint(key, known)}")


def _no_such(value: str, known: Iterable[str]) -> str:
    return f"unknown value '{value}'; {name_hint(value, known)}"


def name_hint(value: str, known: Iterable[str]) -> str:
    """Return a hint for the unknown name `value`: a similar name, or the known names."""
    known = list(known)
    partial_matches = [name for name in known if value in name.split("_")]
    matches = [*difflib.get_close_matches(value, known, n=1), *partial_matches]
    if matches:
        return f"did you mean '{matches[0]}'?"
    omitted = f" and {len(known) - _MAX_LISTED_NAMES} more" if len(known) > _MAX_LISTED_NAMES else ""
    return f"known names: {', '.join(known[:_MAX_LISTED_NAMES])}{omitted}"
