"""Principals: the account and key of a request, and the key's terms."""

from dataclasses import dataclass, field
from typing import Literal

Role = Literal["user", "admin"]


@dataclass(frozen=True)
class Window:
    """Window of a cap: `balance` counts all tokens ever used, `rolling` the tokens of windows of `seconds`."""

    kind: Literal["balance", "rolling"] = "balance"
    seconds: int = 0


@dataclass(frozen=True)
class Principal:
    """The account and key of a request, with the key's terms.

    An anonymous request has the principal None.

    Attributes:
        account_id: the account that is billed.
        key_id: name of the key in the ledger and in metrics; never the secret.
        role: `admin` may use the admin API.
        models: allowed model ids (not aliases); None means all.
        hard_cap: maximum number of tokens within a window; None means no cap.
        window: the window of the cap.
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
        """Return the headers that name the principal to nodes."""
        return {"x-helexa-account-id": self.account_id, "x-helexa-key-id": self.key_id}
