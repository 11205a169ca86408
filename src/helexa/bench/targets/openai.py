"""Targets of the kinds `openai`, `anthropic` and `cortex`, whose models and version are read from the public API."""

from typing import Any
from urllib.parse import urlsplit

from helexa.bench.identity import EXTERNAL, Build, Host, Model, TargetKind
from helexa.bench.store.rows import Reading
from helexa.bench.targets.http import JsonCalls
from helexa.bench.targets.target import Control, Identity, ServedModel, TargetError

_MAX_MODELS = 256
_MAX_VERSION_CHARS = 100


class OpenAITarget:
    """A server with OpenAI's or Anthropic's API format, or helexa's gateway (cortex).

    Of the server's hardware, only the host name is known. The build is identified by the engine and its version, which
    llama.cpp, vLLM and Ollama report. A new version is therefore measured as a new build.
    """

    def __init__(self, calls: JsonCalls, kind: TargetKind) -> None:
        self._calls = calls
        self._kind = kind
        self._engine = kind

    @property
    def control(self) -> Control | None:
        """Always None, because these servers have no management API."""
        return None

    @property
    def ignore_eos(self) -> bool:
        """True if the server supports the parameter `ignore_eos`. Only valid after a call of `identity`."""
        return self._engine in ("cortex", "llama.cpp", "vllm")

    async def identity(self) -> Identity:
        """Return the host name, and the engine with its version if the server reports it."""
        host = Host(urlsplit(self._calls.endpoint).hostname or "")
        if self._kind == "cortex":
            document = await self._calls.get_or_none("/openapi.json")
            version = _field(document.get("info") if isinstance(document, dict) else None, "version")
            return Identity(host, Build("cortex", version or EXTERNAL, version=version))
        if self._kind == "anthropic":
            return Identity(host, Build("anthropic", EXTERNAL))
        for engine, path, key in _VERSIONS:
            version = _field(await self._calls.get_or_none(path), key)
            if version:
                self._engine = engine
                return Identity(host, Build(engine, version, version=version))
        self._engine = self._kind
        return Identity(host, Build(self._kind, EXTERNAL))

    async def models(self) -> list[ServedModel]:
        """Return the models that `/v1/models` lists, except models that a helexa server lists as not loaded."""
        listing = await self._calls.get("/v1/models")
        data = listing.get("data") if isinstance(listing, dict) else None
        if not isinstance(data, list):
            raise TargetError(f"{self._calls.endpoint}/v1/models does not answer as an OpenAI server does")
        entries = [entry for entry in data[:_MAX_MODELS] if isinstance(entry, dict) and _field(entry, "id")]
        return [_served(entry) for entry in entries if entry.get("loaded", True) is True]

    async def readings(self, at_s: float) -> list[Reading]:
        """Return an empty list, because these servers do not report accelerator readings."""
        return []


_VERSIONS = (
    ("llama.cpp", "/props", "build_info"),
    ("ollama", "/api/version", "version"),
    ("vllm", "/version", "version"),
)


def _field(value: Any, key: str) -> str:
    text = value.get(key) if isinstance(value, dict) else None
    return text[:_MAX_VERSION_CHARS] if isinstance(text, str) else ""


def _served(entry: dict[str, Any]) -> ServedModel:
    capabilities = entry.get("capabilities")
    context = entry.get("max_model_len")
    named = frozenset(map(str, capabilities)) if isinstance(capabilities, list) else frozenset[str]()
    tool_call = entry.get("tool_call", True)
    return ServedModel(
        Model(str(entry["id"])),
        named or frozenset({"text"}),
        context if isinstance(context, int) else None,
        tool_call is True,
    )
