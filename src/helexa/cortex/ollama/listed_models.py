"""Models in the responses of Ollama's API: `/api/tags`, `/api/ps`, `/api/show`.

All values of models come from what the nodes report. If no node reports a value, a text is empty and a number is 0.
"""

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from math import inf
from typing import Any

import orjson

from helexa.core.catalog import PINNED_RESIDENCY
from helexa.core.node_reports import ModelInfo
from helexa.cortex.fleet.fleet_view import VISION, files_of
from helexa.cortex.lifecycle.fleet_snapshot import FleetSnapshot

_UNKNOWN_ARCHITECTURE = "unknown"
_EMBEDDING = "embedding"
_SAFETENSORS = "safetensors"
_FOREVER_SECS = 100 * 365 * 86400  # clients show more than 20 years as "forever"
_MB = 1 << 20


class ListedModel:
    """A model or alias of the gateway in the format of Ollama's API."""

    def __init__(self, snapshot: FleetSnapshot, entry: Mapping[str, Any]) -> None:
        self._snapshot = snapshot  # the state of the nodes
        self._entry = entry  # the entry of the model or alias in `/v1/models`
        self._model = snapshot.catalog.resolve(entry["id"])
        nodes = snapshot.view.nodes
        self._reports = [node.models[self._model] for node in nodes if self._model in node.models]
        self._files = files_of(snapshot.view, snapshot.catalog, self._model)

    @property
    def is_running(self) -> bool:
        """Whether a node has loaded the model."""
        return any(info.status == "loaded" for info in self._reports)

    def tag(self) -> dict[str, Any]:
        """Return the entry of the model in `/api/tags`."""
        return self._summary() | {"capabilities": self._capabilities()}

    def running(self) -> dict[str, Any]:
        """Return the entry of a loaded model in `/api/ps`."""
        return self._summary() | {
            "size": sum(map(_used_bytes, self._reports)),
            "size_vram": sum(_used_bytes(info) for info in self._reports if info.devices),
            "context_length": self._context() or 0,
            "expires_at": self._expires_at(),
        }

    def show(self) -> dict[str, Any]:
        """Return the response to `/api/show`."""
        summary = self._summary()
        architecture = summary["details"]["family"] or _UNKNOWN_ARCHITECTURE
        info: dict[str, Any] = {
            "general.architecture": architecture,
            "general.basename": str(self._entry["id"]).rpartition("/")[2],
            "general.parameter_count": self._files and self._files.parameters,
            f"{architecture}.context_length": self._context(),
        }
        return {
            "modelfile": "",
            "parameters": "",
            "template": "",
            "details": summary["details"],
            "model_info": {name: value for name, value in info.items() if value is not None},
            "capabilities": self._capabilities(),
            "modified_at": summary["modified_at"],
        }

    def _summary(self) -> dict[str, Any]:
        files = self._files
        summary: dict[str, Any] = {
            "name": self._entry["id"],
            "model": self._entry["id"],
            "modified_at": _text(datetime.fromtimestamp(files.modified if files and files.modified else 0, UTC)),
            "size": files.size_bytes if files else max(map(_used_bytes, self._reports), default=0),
            "details": self._details(),
        }
        # Clients compare digests to see whether a model has changed, so the digest depends only on the model's files.
        facts = [self._model, *((files.source, files.form, files.size_bytes, files.modified) if files else ())]
        return summary | {"digest": hashlib.sha256(orjson.dumps(facts)).hexdigest()}

    def _details(self) -> dict[str, Any]:
        files = self._files
        form = files.form if files else ""
        is_checkpoint = form == _SAFETENSORS
        architectures = [info.architecture for info in self._reports] + ([files.architecture] if files else [])
        family = next(filter(None, architectures), "")
        quant = next((info.quant for info in self._reports if info.quant), "" if is_checkpoint else form)
        return {
            "parent_model": "",
            "format": form if is_checkpoint else "gguf" if form or (files and files.source.endswith(".gguf")) else "",
            "family": family,
            "families": [family] if family else [],
            "parameter_size": _count_text(files.parameters) if files and files.parameters else "",
            "quantization_level": quant,
        }

    def _context(self) -> int | None:
        """Return the loaded model's context length, else its trained context length."""
        return self._entry.get("max_model_len") or (self._files and self._files.context)

    def _capabilities(self) -> list[str]:
        """Return the capabilities of the model in Ollama's names."""
        names = self._entry.get("capabilities") or []
        present = {
            "completion": names != [_EMBEDDING],
            "tools": self._entry.get("tool_call"),
            "insert": "insert" in names,
            VISION: VISION in names,
            _EMBEDDING: _EMBEDDING in names,
            "thinking": self._entry.get("reasoning"),
        }
        return [name for name, is_present in present.items() if is_present]

    def _expires_at(self) -> str:
        """Return when the gateway will unload the model if no more requests arrive."""
        snapshot, left_secs = self._snapshot, _FOREVER_SECS
        ttl = snapshot.idle_ttl_secs(self._model)
        if ttl < inf and snapshot.rank(self._model) < PINNED_RESIDENCY:
            residents = [one for node in snapshot.view.nodes for one in snapshot.residents(node)]
            idle_secs = min((one.idle_secs(snapshot.now) for one in residents if one.model == self._model), default=0.0)
            left_secs = min(max(ttl - idle_secs, 0.0), _FOREVER_SECS)
        return _text(datetime.now(UTC) + timedelta(seconds=left_secs))


def _text(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def _count_text(parameters: int) -> str:
    """Return a number of parameters as text, such as `135M` or `7.6B`."""
    billions = parameters / 1e9
    return f"{billions:.1f}B" if billions >= 0.95 else f"{parameters / 1e6:.0f}M"


def _used_bytes(info: ModelInfo) -> int:
    megabytes = info.vram_used_mb if info.granted_mb is None else info.granted_mb
    return max(0, megabytes or 0) * _MB
