"""What the gateway learns from refusals of each third-party backend."""

import time
from dataclasses import dataclass, field, fields
from typing import Any

# The gateway forgets after this time what it has learned about a backend, because the backend may be updated.
KNOWLEDGE_SECS = 3600.0


@dataclass(frozen=True)
class Knowledge:
    """Facts that the gateway learned from refusals of one backend, for one model."""

    refused: frozenset[str] = frozenset()  # optional fields that the backend refuses
    lacks_responses: bool = False  # True if the backend has no `/v1/responses`
    # True if the backend's `/v1/responses` refuses tools that are not functions. The gateway then translates a request
    # with other tools to a chat request, in which the functions of namespaces are plain functions.
    functions_only: bool = False
    alternates: bool = False  # True if the roles of messages must alternate
    plain_texts: bool = False  # True if the content of a message must be a string, not a list of parts
    reasons: bool = False  # True if all messages of the assistant must have reasoning
    no_effort: bool = False  # True if the model accepts tools only with the reasoning effort `none`
    short_ids: bool = False  # True if ids of tool calls must have Mistral's format
    short_names: bool = False  # True if names of functions must be short
    signed: bool = False  # True if tool calls must have signatures
    most_output: int = 0  # largest output limit of the model, or 0 if unknown
    # Context length of a model that vLLM serves, or 0 if unknown. If the output limit of a request is not below the
    # context length, the gateway removes the output limit, because vLLM refuses it.
    context: int = 0


_NOTHING = Knowledge()


@dataclass
class BackendKnowledge:
    """The knowledge about all third-party backends, by base URL and model.

    The models of one backend may have different chat templates, or be on different servers behind the backend.
    """

    _entries: dict[tuple[str, str], tuple[Knowledge, float]] = field(
        default_factory=dict[tuple[str, str], tuple[Knowledge, float]]
    )

    def of(self, url: str, model: str) -> Knowledge:
        """Return the facts that are known about a model of the backend at `url`."""
        knowledge, until = self._entries.get((url, model), (_NOTHING, 0.0))
        if knowledge is not _NOTHING and time.monotonic() >= until:
            del self._entries[url, model]
            return _NOTHING
        return knowledge

    def add(self, url: str, model: str, lesson: Knowledge) -> None:
        """Add the facts `lesson`, learned from a refusal, to the known facts."""
        known = self.of(url, model)
        facts: dict[str, Any] = {
            part.name: getattr(lesson, part.name) or getattr(known, part.name) for part in fields(Knowledge)
        }
        facts["refused"] = known.refused | lesson.refused
        merged = Knowledge(**facts)
        self._entries[url, model] = merged, time.monotonic() + KNOWLEDGE_SECS
