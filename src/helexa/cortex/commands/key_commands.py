"""`cortex keys`: create, list and revoke keys on the gateway's host, directly in the ledger's database."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from cyclopts import Parameter

from helexa.core import catalogue
from helexa.core.catalogue import Catalogue
from helexa.core.text_table import text_table
from helexa.cortex.access.key import Key, static_keys
from helexa.cortex.access.key_terms import NewKey, key_json, reject_static
from helexa.cortex.commands.duration import duration_text, parse_duration
from helexa.cortex.config import CortexConfig, load
from helexa.cortex.ledger.keys import KeyStore
from helexa.cortex.ledger.statement import budget
from helexa.cortex.ledger.storage.backends import open_database
from helexa.cortex.ledger.storage.database import Database

T = TypeVar("T")
Config = Annotated[Path, Parameter(name=["--config", "-c"])]
Json = Annotated[bool, Parameter(name="--json", negative="")]

_HEADINGS = (
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


def create(
    *,
    account: str,
    key_id: Annotated[str | None, Parameter(name=["--key-id", "--name"])] = None,
    models: str | None = None,
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
        models: allowed models, separated by commas; all by default.
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
        fields["models"] = [name.strip() for name in models.split(",")]
    if window != "balance":
        fields["window"] = {"kind": "rolling", "seconds": parse_duration(window)}
    if expires is not None:
        fields["expires_at"] = time.time() + parse_duration(expires)
    models_catalogue = Catalogue() if models is None else catalogue.load(settings.models_config)
    principal = NewKey.from_fields(fields).principal(models_catalogue)
    reject_static(static_keys(settings.entitlements), principal.key_id)
    key, secret = _with_ledger(settings, lambda database: KeyStore(database).create(principal))
    if as_json:
        print(json.dumps(key_json(key) | {"key": secret.get_secret_value()}))
        return
    print(secret.get_secret_value())
    print(f"\nCreated key '{principal.key_id}' of account '{principal.account_id}' in {_where(settings)}.")
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
        print(text_table(_HEADINGS, [_row(key, spent) for key, spent in spending]))
    else:
        print(f"no keys in {_where(settings)}; create one with `cortex keys create --account NAME`")


def revoke(key_id: str, /, *, config: Config = Path("cortex.toml")) -> None:
    """Revoke a key permanently. Its spent tokens stay in the ledger, and its name cannot be used again.

    Args:
        key_id: name of the key.
        config: the gateway's configuration file, which names the ledger.
    """
    settings = load(config)
    reject_static(static_keys(settings.entitlements), key_id)
    _with_ledger(settings, lambda database: KeyStore(database).revoke(key_id))
    print(f"key '{key_id}' is revoked; running gateways reject it within a second")


def _with_ledger(settings: CortexConfig, work: Callable[[Database], Awaitable[T]]) -> T:
    async def run_with_database() -> T:
        database = await open_database(settings.ledger.url.get_secret_value())
        try:
            await database.migrate()
            return await work(database)
        finally:
            await database.close()

    return asyncio.run(run_with_database())


def _where(settings: CortexConfig) -> str:
    """Return the location of the ledger's database as text, without the password."""
    url = settings.ledger.url.get_secret_value()
    if url.startswith("sqlite:"):
        return f"the ledger {Path(url.removeprefix('sqlite:')).absolute()}"
    url_parts = urlsplit(url)
    return f"the ledger {url_parts.path.lstrip('/')} at {url_parts.hostname or 'the local PostgreSQL'}"


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
