"""`cortex keys` and `cortex nodes`: commands on the ledger's host."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from cyclopts import Parameter
from pydantic import ValidationError

from helexa.core import catalog
from helexa.core.address import is_loopback
from helexa.core.catalog import Catalog
from helexa.core.display import printable, text_table
from helexa.core.errors import ConfigError, HelexaError, UsageError
from helexa.cortex.access.keys import Key, NewKey, key_json, reject_static, static_keys
from helexa.cortex.api.admin_requests import NewInvitation
from helexa.cortex.config import CortexConfig, load
from helexa.cortex.ledger.keys_and_nodes import KeyStore, NodeStore
from helexa.cortex.ledger.reservations_in_memory import budget
from helexa.cortex.ledger.storage import open_database
from helexa.cortex.ledger.storage.database import Database

T = TypeVar("T")
Config = Annotated[Path, Parameter(name=["--config", "-c"])]
Json = Annotated[bool, Parameter(name="--json", negative="")]

_UNITS = {"w": 604800, "d": 86400, "h": 3600, "m": 60, "s": 1}
_KEY_HEADINGS = (
    "KEY ID",
    "ACCOUNT",
    "ROLE",
    "SECRET",
    "MODELS",
    "SPENT",
    "CAP",
    "WINDOW",
    "REQ/MIN",
    "TOK/MIN",
    "AT ONCE",
    "STATE",
)
_INVITATION_PROBLEMS = {
    "name": "--name is not a name for a node; use at most 63 letters, digits, dots, underscores and hyphens",
    "networks": "--network is not a network; write it like 10.1.0.0/16",
    "expires_secs": "--expires is longer than 7d; give at most 7d",
}
_NODE_HEADINGS = ("NODE", "ENDPOINT", "KIND", "SOURCE", "JOINED")


def _with_ledger(settings: CortexConfig, work: Callable[[Database], Awaitable[T]]) -> T:
    """Open the ledger for a command, and return the result of `work`."""

    async def run_with_database() -> T:
        database = await open_database(settings.ledger.url.get_secret_value())
        try:
            await database.migrate()
            return await work(database)
        finally:
            await database.close()

    return asyncio.run(run_with_database())


def _ledger_name(settings: CortexConfig) -> str:
    """Return a name of the ledger to print, without the password in its URL."""
    url = settings.ledger.url.get_secret_value()
    if url.startswith("sqlite:"):
        return f"the ledger {Path(url.removeprefix('sqlite:')).absolute()}"
    url_parts = urlsplit(url)  # only path and host are shown, because the rest of the URL may contain a password
    return f"the ledger {url_parts.path.lstrip('/')} at {url_parts.hostname or 'the local PostgreSQL'}"


def parse_duration(text: str) -> int:
    """Parse a duration such as `15m` in a command, and return its number of seconds.

    Raises:
        UsageError: the text is not a duration.
    """
    number, unit = text[:-1], text[-1:]
    if not (number.isascii() and number.isdigit() and unit in _UNITS and 0 < int(number) < 10**6):
        raise UsageError(f"'{text[:40]}' is not a duration; write it like 90s, 15m, 24h, 30d or 2w")
    return int(number) * _UNITS[unit]


def duration_text(seconds: float) -> str:
    """Return `seconds`, rounded, as a duration such as `15m` for a command."""
    whole_seconds = round(seconds)
    unit = next((unit for unit, size in _UNITS.items() if whole_seconds and whole_seconds % size == 0), "s")
    return f"{whole_seconds // _UNITS[unit]}{unit}"


def create(
    *,
    account: str,
    key_id: Annotated[str | None, Parameter(name=["--key-id", "--name"])] = None,
    models: Annotated[list[str] | None, Parameter(negative="")] = None,
    cap: int | None = None,
    window: str = "balance",
    rpm: int | None = None,
    tpm: int | None = None,
    concurrency: int | None = None,
    expires: str | None = None,
    admin: Annotated[bool, Parameter(negative="")] = False,
    config: Config = Path("cortex.toml"),
    as_json: Json = False,
) -> None:
    """Create a key and show its secret once.

    Args:
        account: the account that is charged.
        key_id: name of the key; by default derived from the account's name.
        models: allowed models, separated by commas; all by default. May be given several times.
        cap: maximum number of tokens within a window; no cap by default.
        window: window of the cap: balance (never resets) or a duration like 24h, after which a new window begins.
        rpm: requests per minute at one gateway.
        tpm: tokens per minute at one gateway.
        concurrency: concurrent requests at one gateway.
        expires: lifetime of the key, like 30d; unlimited by default.
        admin: allow the admin API.
        config: the gateway's configuration file, which names the ledger.
        as_json: print JSON for programs.
    """
    settings = load(config)
    fields: dict[str, Any] = {
        "account_id": account,
        "key_id": key_id,
        "role": "admin" if admin else "user",
        "hard_cap": cap,
        "requests_per_minute": rpm,
        "tokens_per_minute": tpm,
        "concurrency": concurrency,
    }
    if models is not None:
        fields["models"] = [name.strip() for text in models for name in text.split(",")]
    if window != "balance":
        fields["window"] = {"kind": "rolling", "seconds": parse_duration(window)}
    if expires is not None:
        fields["expires_at"] = time.time() + parse_duration(expires)
    # The catalog is needed only to resolve aliases in `models`. Without `models`, a key can be created even if the
    # catalog is invalid.
    models_catalog = Catalog() if models is None else catalog.load(settings.models_config)
    principal = NewKey.from_fields(fields).principal(models_catalog)
    reject_static(static_keys(settings.entitlements), principal.key_id)
    key, secret = _with_ledger(settings, lambda database: KeyStore(database).create(principal))
    if as_json:
        print(json.dumps(key_json(key) | {"key": secret.get_secret_value()}))
        return
    print(secret.get_secret_value())  # alone in the first line, so that scripts can read it with `head -1`
    print(f"\nCreated key '{principal.key_id}' of account '{principal.account_id}' in {_ledger_name(settings)}.")
    print("The secret is shown only once. Running gateways accept the key within a second.")
    if not settings.entitlements.require_auth:
        print("Requests without a key are accepted too, unless entitlements.require_auth = true.")


def list_keys(*, config: Config = Path("cortex.toml"), as_json: Json = False) -> None:
    """List all keys, without their secrets.

    Args:
        config: the gateway's configuration file, which names the ledger.
        as_json: print JSON for programs.
    """
    settings = load(config)
    static = static_keys(settings.entitlements)

    async def read_keys(database: Database) -> list[tuple[Key, int]]:
        keys = [*static, *await KeyStore(database).list()]
        return [(key, (await budget(database, key.principal, time.time())).spent) for key in keys]

    spending = _with_ledger(settings, read_keys)
    if as_json:
        entries = [key_json(key, "database" if key.hint else "config") | {"spent": spent} for key, spent in spending]
        print(json.dumps(entries, indent=2))
    elif spending:
        print(text_table(_KEY_HEADINGS, [_row(key, spent) for key, spent in spending]))
    else:
        print(f"no keys in {_ledger_name(settings)}; create one with `cortex keys create --account NAME`")


def revoke(key_id: str, /, *, config: Config = Path("cortex.toml")) -> None:
    """Revoke a key permanently.

    Its spent tokens stay in the ledger, and its name cannot be used again.

    Args:
        key_id: name of the key.
        config: the gateway's configuration file, which names the ledger.
    """
    settings = load(config)
    reject_static(static_keys(settings.entitlements), key_id)
    _with_ledger(settings, lambda database: KeyStore(database).revoke(key_id))
    print(f"key '{key_id}' is revoked; running gateways reject it within a second")


def _row(key: Key, spent: int) -> tuple[object, ...]:
    principal = key.principal
    return (
        principal.key_id,
        principal.account_id,
        principal.role,
        f"{key.hint}..." if key.hint else "in cortex.toml",
        "all" if principal.models is None else ",".join(sorted(principal.models)) or "none",
        spent,
        principal.hard_cap,
        "balance" if principal.window.kind == "balance" else duration_text(principal.window.seconds),
        principal.requests_per_minute,
        principal.tokens_per_minute,
        principal.concurrency,
        _state(key),
    )


def _state(key: Key) -> str:
    expires_at, now = key.principal.expires_at, time.time()
    if key.revoked_at is not None:
        return "revoked"
    if expires_at is None:
        return "good"
    expiry = time.strftime("%Y-%m-%d %H:%M", time.localtime(expires_at))
    return f"good until {expiry}" if expires_at > now else f"expired {expiry}"


def invite(
    *,
    name: str | None = None,
    network: Annotated[list[str] | None, Parameter(negative=())] = None,
    expires: str = "15m",
    url: str | None = None,
    config: Config = Path("cortex.toml"),
    as_json: Json = False,
) -> None:
    """Create a token with which one node can join, and show the command for the node.

    The token is shown once.

    Args:
        name: name that the node must have; by default the node's host name.
        network: network in which the node's address may be, like 10.1.0.0/16, besides the address from which the node
            joins. Repeatable.
        expires: lifetime of the token, at most 7d.
        url: URL under which the node reaches the gateway. The printed command contains it.
        config: the gateway's configuration file, which names the ledger.
        as_json: print JSON for programs.
    """
    settings = load(config)
    try:
        request = NewInvitation(name=name, networks=network or [], expires_secs=parse_duration(expires))
    except ValidationError as error:
        field = error.errors(include_url=False)[0]["loc"][0]
        raise UsageError(_INVITATION_PROBLEMS[str(field)]) from None
    networks = [ip_network(text) for text in request.networks]
    invitation, token = _with_ledger(
        settings, lambda database: NodeStore(database).invite(request.expires_secs, name, networks)
    )
    if as_json:
        print(json.dumps({"token": token.get_secret_value(), "name": name, "expires_at": invitation.expires_at}))
        return
    named = f" --name {name}" if name else ""
    print(f"helexa node join {url or _url(settings)} --token {token.get_secret_value()}{named}")
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(invitation.expires_at))
    print(f"\nRun this command on the node. The token works once, until {until}.")


def list_nodes(*, config: Config = Path("cortex.toml"), as_json: Json = False) -> None:
    """List the nodes of the configuration and the nodes that joined.

    `helexa status` shows their state.

    Args:
        config: the gateway's configuration file, which names the ledger.
        as_json: print JSON for programs.
    """
    settings = load(config)
    joined = _with_ledger(settings, lambda database: NodeStore(database).list())
    names = {neuron.name for neuron in settings.neurons}
    nodes: list[dict[str, Any]] = [
        {"name": neuron.name, "endpoint": neuron.endpoint, "kind": neuron.kind, "source": "config", "joined_at": None}
        for neuron in settings.neurons
    ]
    nodes += [
        {
            "name": node.name,
            "endpoint": node.endpoint,
            "kind": "neuron",
            "source": "joined",
            "joined_at": node.joined_at,
        }
        for node in joined
        if node.name not in names  # the configuration takes precedence over a node that joined under the same name
    ]
    if as_json:
        print(json.dumps(nodes, indent=2))
    elif nodes:
        print(text_table(_NODE_HEADINGS, [(*list(node.values())[:-1], _date(node["joined_at"])) for node in nodes]))
    else:
        print(f"no nodes in {config} or in {_ledger_name(settings)}; add one with `cortex nodes invite`")


def remove(name: str, /, *, config: Config = Path("cortex.toml")) -> None:
    """Remove a node that joined.

    The node itself keeps running, but the gateway no longer uses its key.

    Args:
        name: name of the node.
        config: the gateway's configuration file, which names the ledger.
    """
    settings = load(config)
    if not _with_ledger(settings, lambda database: NodeStore(database).remove(name)):
        if any(neuron.name == name for neuron in settings.neurons):
            raise ConfigError(f"node '{printable(name)}' is defined in {config}; remove the node there")
        raise HelexaError(f"no node named '{printable(name)}' has joined; `cortex nodes list` shows the nodes")
    print(f"node '{name}' is removed; running gateways send it no more requests within a second")


def _url(settings: CortexConfig) -> str:
    listen = settings.gateway.listen
    is_address = not is_loopback(listen.host) and listen.host not in ("0.0.0.0", "::")
    return f"http://{listen}" if is_address else "https://URL-OF-THE-GATEWAY"


def _date(joined_at: float | None) -> str:
    return "" if joined_at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(joined_at))
