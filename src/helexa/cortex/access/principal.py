"""Who asks: the account and key that a request is billed to, and what they may do."""

from dataclasses import dataclass, field
from typing import Literal

Role = Literal["user", "admin"]


@dataclass(frozen=True)
class Window:
    """How a cap counts: `balance` once and for all, `rolling` anew every `seconds`."""

    kind: Literal["balance", "rolling"] = "balance"
    seconds: int = 0


@dataclass(frozen=True)
class Principal:
    """The holder of a key. A request without one is anonymous: None stands for it.

    Attributes:
        account_id: who pays.
        key_id: name of the key in the ledger and in metrics; never the secret.
        role: `admin` may use the admin API.
        models: the model ids (not aliases) it may use; None means all.
        hard_cap: tokens it may spend within a window; None means no cap.
        requests_per_minute, tokens_per_minute, concurrency: limits of this key at one gateway; None means no limit.
        expires_at: Unix seconds; None means never.
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
        """Who asks, as nodes are told."""
        return {"x-helexa-account-id": self.account_id, "x-helexa-key-id": self.key_id}
