"""Principals: the account and API key that a request is billed to, with the key's limits and allowed models."""

from dataclasses import dataclass, field
from typing import Literal

Role = Literal["user", "admin"]


@dataclass(frozen=True)
class Window:
    """Period in which a key's token cap counts tokens.

    Attributes:
        kind: `balance` counts all tokens that were ever used. `rolling` counts the tokens of one window after another.
        seconds: length of a rolling window; 0 for a balance.
    """

    kind: Literal["balance", "rolling"] = "balance"
    seconds: int = 0


@dataclass(frozen=True)
class Principal:
    """The account and API key that a request is billed to, with the key's limits.

    Functions use None as the principal of an anonymous request.

    Attributes:
        account_id: the account that is billed.
        key_id: name of the key in the ledger and in metrics; never the secret.
        role: `user` or `admin`. Only an admin may use the admin API.
        models: ids of the allowed models (not aliases); None means all models.
        hard_cap: maximum number of tokens within the window; None means no cap.
        window: the period in which `hard_cap` counts tokens.
        requests_per_minute: maximum number of requests per minute at one gateway; None means no limit.
        tokens_per_minute: maximum number of tokens per minute at one gateway; None means no limit.
        concurrency: maximum number of concurrent requests at one gateway; None means no limit.
        expires_at: when the key expires (Unix seconds); None means never.
    """

    account_id: str
    key_id: str
    role: Role = "user"
    models: frozenset[str] | None = None
    hard_cap: int | None = None
    window: Window = field(default_factory=Window)
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None
    expires_at: float | None = None

    def headers(self) -> dict[str, str]:
        """Return the HTTP headers with which the gateway tells a node the account and the key of a request."""
        return {"x-helexa-account-id": self.account_id, "x-helexa-key-id": self.key_id}
