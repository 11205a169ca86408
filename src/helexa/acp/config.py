"""The configuration as values."""

from pathlib import Path
from typing import Literal

from msgspec import Struct, field

WireApi = Literal["auto", "openai-chat", "openai-responses", "anthropic-messages"]
Mode = Literal["default", "acceptEdits", "plan", "bypassPermissions"]


class Endpoint(Struct, frozen=True, kw_only=True):
    """A place that serves models.

    Attributes:
        name: how it is called in `endpoint:model`; never empty, no colon.
        base_url: with its `/v1`, without a trailing slash.
        wire_api: the dialect it speaks; `auto` finds out by asking.
        default_model: the model of a new session.
        api_key: never shown, logged or saved.
        max_tokens: the most tokens of one answer; None leaves it to the endpoint.
        context_window: tokens, where the endpoint does not tell them itself.
    """

    name: str
    base_url: str
    wire_api: WireApi = "openai-chat"
    default_model: str | None = None
    api_key: str | None = None
    max_tokens: int | None = None
    context_window: int | None = None

    def __repr__(self) -> str:
        return f"Endpoint({self.name!r}, {self.base_url!r}, {self.wire_api!r})"


class Settings(Struct, frozen=True, kw_only=True):
    """Everything that is configured.

    Attributes:
        endpoints: at least one, names differ.
        default_endpoint: the name of one of them.
        system_prompt_path: a prompt of the user's own instead of the built-in one; `{cwd}` in it is the folder.
        default_mode: of a session in a project that has no mode remembered.
        allow_fetch: whether the model may fetch from the web.
        data_dir: sessions, preferences and plans are kept below it.
        warnings: what was passed over when it was read, for the log and for /status.
    """

    endpoints: tuple[Endpoint, ...]
    default_endpoint: str
    system_prompt_path: Path | None = None
    default_mode: Mode = "default"
    allow_fetch: bool = False
    data_dir: Path = field(default_factory=lambda: Path.home() / ".local/share/helexa-acp")
    warnings: tuple[str, ...] = ()
