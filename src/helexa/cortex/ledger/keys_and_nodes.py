"""API keys, invitations and joined nodes in the database."""

import asyncio
import secrets
import string
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any, ClassVar, Generic, TypeVar

import orjson
from pydantic import SecretStr

from helexa.core.errors import ApiError
from helexa.cortex.access.keys import Key, Principal, Window, digest_of, hint_of, new_secret
from helexa.cortex.ledger.storage.database import Database, Row, Sql, repeat

_COLUMNS = (
    "key_id, account_id, role, models, hard_cap, window_kind, window_seconds, requests_per_minute, tokens_per_minute, "
    "concurrency, expires_at"
)


T = TypeVar("T")

MAX_NODES = 1000
MAX_INVITATIONS = 100
TOKEN_PREFIX = "hlxjoin_"
_RANDOM_CHARS = 43  # from an alphabet of 62 characters, which gives 256 bits
_HINT_CHARS = len(TOKEN_PREFIX) + 4


class _Store(ABC, Generic[T]):
    """A table that any gateway may change, with a counter of the changes.

    All methods raise `DatabaseError` when the database does not answer.
    """

    rows: ClassVar[str]  # plural noun for the rows, for log messages; the counter's table is named after its singular
    poll_secs: ClassVar[float]  # seconds between two reads of the counter by `watching`

    def __init__(
        self,
        database: Database,
        clock: Callable[[], float] = time.time,
        *,
        apply: Callable[[Sequence[T]], None] = lambda _rows: None,
    ) -> None:
        """Store the arguments. `refresh` passes the rows to `apply`."""
        self._database = database
        self._clock = clock
        self._apply = apply
        self._applied_changes: int | None = None
        self._refreshing = asyncio.Lock()

    @abstractmethod
    async def list(self) -> Sequence[T]:
        """Return all rows, oldest first."""

    async def changes(self) -> int:
        """Return a counter that is incremented whenever any gateway changes a row."""
        (row,) = await self._database.fetch(f"SELECT count FROM {self.rows[:-1]}_changes")
        return row["count"]

    async def refresh(self) -> None:
        """In the first call, and if a row has changed since, pass all rows to `apply`."""
        async with self._refreshing:
            changes = await self.changes()
            if changes != self._applied_changes:
                self._apply(await self.list())  # read after the counter, so that the rows are not older
                self._applied_changes = changes

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Return a context manager that keeps calling `refresh` in the background.

        Entering it calls `refresh` once, and raises the error of this call. If a later `refresh` fails because the
        database does not answer, the rows of the last successful call remain in use.
        """
        await self.refresh()
        # `repeat` continues after any exception: if this task ended, revoked keys would stay valid.
        task = asyncio.create_task(repeat(self.refresh, self.poll_secs, f"changes of {self.rows} cannot be read"))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[Sql]:
        async with self._database.transaction(durable=True) as sql:
            # This statement must be first: its row lock serializes changes across gateways.
            await sql.execute(f"UPDATE {self.rows[:-1]}_changes SET count = count + 1")
            yield sql


class KeyStore(_Store[Key]):
    """Creates, lists, changes and revokes API keys in the database.

    Changes survive a power failure, so a revoked key stays revoked.
    """

    rows = "keys"
    poll_secs = 0.25  # a revoked key must soon be rejected

    async def create(self, principal: Principal) -> tuple[Key, SecretStr]:
        """Create a key and return it with its secret, which cannot be read again.

        Raises:
            ApiError: 409 if a key with this id exists. An id of a revoked key cannot be reused either, because charges
                are stored under this id.
        """
        secret = new_secret()
        key = Key(principal, digest_of(secret.get_secret_value().encode()), hint_of(secret), self._clock())
        values = (*_values(principal), key.digest, key.hint, key.created_at)
        async with self._changing() as sql:
            if await sql.fetch("SELECT 1 FROM keys WHERE key_id = $1", principal.key_id):
                raise ApiError(
                    409, "key_exists", f"key '{principal.key_id}' already exists; choose another key_id", param="key_id"
                )
            await sql.execute(
                f"INSERT INTO keys ({_COLUMNS}, digest, hint, created_at) "
                "VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)",
                *values,
            )
        return key, secret

    async def list(self) -> Sequence[Key]:
        """Return all keys including revoked ones, oldest first."""
        return [_key(row) for row in await self._database.fetch("SELECT * FROM keys ORDER BY created_at, key_id")]

    async def change(self, key_id: str, edit: Callable[[Principal], Principal]) -> Key:
        """Replace a key's principal by `edit(principal)` and return the key.

        Raises:
            ApiError: 404 if no key has the id `key_id`.
        """
        async with self._changing() as sql:
            key = await _find(sql, key_id)
            key = replace(key, principal=edit(key.principal))
            await sql.execute(
                "UPDATE keys SET account_id = $2, role = $3, models = $4, hard_cap = $5, window_kind = $6, "
                "window_seconds = $7, requests_per_minute = $8, tokens_per_minute = $9, concurrency = $10, "
                "expires_at = $11 WHERE key_id = $1",
                *_values(key.principal),
            )
        return key

    async def revoke(self, key_id: str) -> Key:
        """Revoke a key permanently and return the key.

        Revoking a revoked key changes nothing.

        Raises:
            ApiError: 404 if no key has the id `key_id`.
        """
        async with self._changing() as sql:
            key = await _find(sql, key_id)
            if key.revoked_at is None:
                key = replace(key, revoked_at=self._clock())
                await sql.execute("UPDATE keys SET revoked_at = $2 WHERE key_id = $1", key_id, key.revoked_at)
        return key


async def _find(sql: Sql, key_id: str) -> Key:
    rows = await sql.fetch("SELECT * FROM keys WHERE key_id = $1", key_id)
    if not rows:
        of_account = "SELECT key_id FROM keys WHERE account_id = $1 AND revoked_at IS NULL ORDER BY key_id LIMIT 3"
        ids = [row["key_id"] for row in await sql.fetch(of_account, key_id)]
        hint = f"keys of the account '{key_id}': {', '.join(ids)}" if ids else "`cortex keys list` shows all keys"
        raise ApiError(404, "key_not_found", f"key '{key_id[:200]}' not found; {hint}", param="key_id")
    return _key(rows[0])


def _values(principal: Principal) -> tuple[Any, ...]:
    """Return the values for the columns `_COLUMNS`, in the same order."""
    return (
        principal.key_id,
        principal.account_id,
        principal.role,
        None if principal.models is None else orjson.dumps(sorted(principal.models)).decode(),
        principal.hard_cap,
        principal.window.kind,
        principal.window.seconds,
        principal.requests_per_minute,
        principal.tokens_per_minute,
        principal.concurrency,
        principal.expires_at,
    )


def _key(row: Row) -> Key:
    principal = Principal(
        account_id=row["account_id"],
        key_id=row["key_id"],
        role=row["role"],
        models=None if row["models"] is None else frozenset(orjson.loads(row["models"])),
        hard_cap=row["hard_cap"],
        window=Window(row["window_kind"], row["window_seconds"]),
        requests_per_minute=row["requests_per_minute"],
        tokens_per_minute=row["tokens_per_minute"],
        concurrency=row["concurrency"],
        expires_at=row["expires_at"],
    )
    return Key(principal, bytes(row["digest"]), row["hint"], row["created_at"], row["revoked_at"])


Network = IPv4Network | IPv6Network


@dataclass(frozen=True)
class Invitation:
    """Permission for one node to join the gateway, for a limited time."""

    digest: bytes = field(repr=False)  # SHA-256 of the token
    hint: str  # first characters of the token, for logs
    node: str | None  # name that the node must have, or None for any name
    # networks in which the node's address may be, besides the address from which the node joins
    networks: tuple[Network, ...]
    expires_at: float  # end of the invitation (Unix seconds)


@dataclass(frozen=True)
class JoinedNode:
    """A node that joined the gateway with an invitation."""

    name: str
    endpoint: str
    bearer: SecretStr
    joined_at: float  # when the node joined (Unix seconds)


class NodeStore(_Store[JoinedNode]):
    """Creates invitations, and adds, lists and removes nodes in the database."""

    rows = "nodes"
    poll_secs = 1.0

    async def invite(
        self, lifetime_secs: float, node: str | None = None, networks: Sequence[Network] = ()
    ) -> tuple[Invitation, SecretStr]:
        """Create an invitation and return it with its token, which cannot be read again.

        Raises:
            ApiError: 409 if `MAX_INVITATIONS` invitations are neither used nor expired.
        """
        alphabet = string.ascii_letters + string.digits
        token = TOKEN_PREFIX + "".join(secrets.choice(alphabet) for _ in range(_RANDOM_CHARS))
        now = self._clock()
        invitation = Invitation(
            digest_of(token.encode()), token[:_HINT_CHARS], node, tuple(networks), now + lifetime_secs
        )
        async with self._changing() as sql:
            await sql.execute("DELETE FROM invitations WHERE expires_at <= $1", now)
            (row,) = await sql.fetch("SELECT COUNT(*) AS count FROM invitations")
            if row["count"] >= MAX_INVITATIONS:
                message = f"{MAX_INVITATIONS} invitations are neither used nor expired; wait until one of them expires"
                raise ApiError(409, "too_many_invitations", message)
            await sql.execute(
                "INSERT INTO invitations (digest, hint, node, networks, expires_at) VALUES ($1, $2, $3, $4, $5)",
                invitation.digest,
                invitation.hint,
                node,
                orjson.dumps([str(network) for network in networks]).decode(),
                invitation.expires_at,
            )
        return invitation, SecretStr(token)

    async def invitation(self, token: str) -> Invitation | None:
        """Return the invitation with this token; None if unknown, used or expired."""
        rows = await self._database.fetch(
            "SELECT * FROM invitations WHERE digest = $1 AND expires_at > $2",
            digest_of(token.encode()),
            self._clock(),
        )
        return _invitation(rows[0]) if rows else None

    async def add(self, invitation: Invitation, name: str, endpoint: str, bearer: SecretStr) -> None:
        """Add a node, and use up its invitation.

        Raises:
            ApiError: 403 if the invitation was used or expired meanwhile. 409 if a node with this name or address has
                joined, or if `MAX_NODES` nodes have joined. The invitation is then not used up.
        """
        async with self._changing() as sql:
            now = self._clock()
            if not await sql.execute(
                "DELETE FROM invitations WHERE digest = $1 AND expires_at > $2", invitation.digest, now
            ):
                raise invalid_invitation()
            for row in await sql.fetch("SELECT name FROM nodes WHERE name = $1 OR endpoint = $2", name, endpoint):
                raise node_exists(row["name"])
            (row,) = await sql.fetch("SELECT COUNT(*) AS count FROM nodes")
            if row["count"] >= MAX_NODES:
                raise ApiError(
                    409,
                    "too_many_nodes",
                    f"{MAX_NODES} nodes have joined, the limit; remove one with `cortex nodes remove`",
                )
            await sql.execute(
                "INSERT INTO nodes (name, endpoint, bearer, joined_at) VALUES ($1, $2, $3, $4)",
                *(name, endpoint, bearer.get_secret_value(), now),
            )

    async def list(self) -> Sequence[JoinedNode]:
        """Return all nodes that joined, oldest first."""
        rows = await self._database.fetch("SELECT * FROM nodes ORDER BY joined_at, name")
        return [JoinedNode(row["name"], row["endpoint"], SecretStr(row["bearer"]), row["joined_at"]) for row in rows]

    async def remove(self, name: str) -> bool:
        """Remove a node that joined, and return whether there was one with this name."""
        async with self._changing() as sql:
            return await sql.execute("DELETE FROM nodes WHERE name = $1", name) > 0


def invalid_invitation() -> ApiError:
    """Return the 403 error for a wrong, used or expired join token."""
    message = "the token is wrong, used or expired; create a new one with `cortex nodes invite`"
    return ApiError(403, "invalid_invitation", message, param="token")


def node_exists(name: str) -> ApiError:
    """Return the 409 error for a join with the name or address of the node `name`."""
    message = (
        f"node '{name}' already has this name or address; choose another --name, or run `cortex nodes remove {name}`"
    )
    return ApiError(409, "node_exists", message, param="name")


def _invitation(row: Row) -> Invitation:
    networks = tuple(ip_network(text) for text in orjson.loads(row["networks"]))
    return Invitation(bytes(row["digest"]), row["hint"], row["node"], networks, row["expires_at"])
