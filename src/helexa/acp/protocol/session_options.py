"""Options of a session that the user chooses: permission mode, model, thinking."""

from typing import Any, get_args

from helexa.acp.agent.context_and_compaction import Choices
from helexa.acp.config import Mode
from helexa.acp.providers.models import ModelCard, ModelChoice
from helexa.acp.providers.requests_and_events import ThoughtLevel

MODES: dict[Mode, tuple[str, str]] = {
    "default": ("Default", "Asks before it changes a file or runs a command."),
    "acceptEdits": ("Accept Edits", "Changes files without asking, asks before it runs a command."),
    "plan": ("Plan", "Reads and plans; writes only plan files."),
    "bypassPermissions": ("Bypass Permissions", "Never asks. Only for disposable machines."),
}
THOUGHT_LEVELS: dict[ThoughtLevel, tuple[str, str]] = {
    "default": ("Default", "The model's default."),
    "none": ("None", "Answer without thinking."),
    "low": ("Low", "Think briefly."),
    "medium": ("Medium", "Think for a while."),
    "high": ("High", "Think for long."),
}
TEMPERATURES: dict[str, tuple[str, float | None]] = {
    "default": ("Default", None),
    "precise": ("Precise (0)", 0.0),
    "balanced": ("Balanced (0.6)", 0.6),
    "creative": ("Creative (1)", 1.0),
}
MAX_MODELS = 1000


def modes(choices: Choices) -> dict[str, Any]:
    """Return the protocol's `modes` object, for older editors."""
    available = [{"id": id, "name": name, "description": description} for id, (name, description) in MODES.items()]
    return {"currentModeId": choices.mode, "availableModes": available}


def config_options(choices: Choices, listed: dict[str, list[ModelCard]], card: ModelCard) -> list[dict[str, Any]]:
    """Return the protocol's `configOptions` list, with the permission mode first.

    Args:
        choices: the current values.
        listed: the models that the user can choose, by endpoint name.
        card: properties of the current model. A model without reasoning gets no option for the thought level.
    """
    options = [
        _select("mode", "Mode", "mode", choices.mode, _option_values(MODES)),
        _select("model", "Model", "model", str(choices.model), _models(choices.model, listed)),
    ]
    if card.thinks is not False:
        options.append(
            _select("thought_level", "Thinking", "thought_level", choices.thought_level, _option_values(THOUGHT_LEVELS))
        )
    temperature = next((id for id, (_, value) in TEMPERATURES.items() if value == choices.temperature), "default")
    presets = [{"value": id, "name": name} for id, (name, _) in TEMPERATURES.items()]
    options.append(_select("temperature", "Temperature", "model_config", temperature, presets))
    return options


def is_mode(text: object) -> bool:
    """Return whether `text` is the name of a permission mode."""
    return text in get_args(Mode)


def is_thought_level(text: object) -> bool:
    """Return whether `text` is the name of a thought level (reasoning effort)."""
    return text in get_args(ThoughtLevel)


def _models(chosen: ModelChoice, listed: dict[str, list[ModelCard]]) -> list[dict[str, Any]]:
    by_endpoint = {name: [card.id for card in cards[:MAX_MODELS]] for name, cards in listed.items()}
    known = by_endpoint.setdefault(chosen.endpoint, [])
    if chosen.model not in known:
        known.insert(0, chosen.model)
    groups = {
        name: [{"value": f"{name}:{id}", "name": id} for id in dict.fromkeys(ids)]
        for name, ids in by_endpoint.items()
        if ids
    }
    if len(groups) == 1:
        return next(iter(groups.values()))
    return [{"group": name, "name": name, "options": options} for name, options in groups.items()]


def _option_values(values: dict[Any, tuple[str, str]]) -> list[dict[str, Any]]:
    return [{"value": id, "name": name, "description": description} for id, (name, description) in values.items()]


def _select(id: str, name: str, category: str, current: str, options: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": id,
        "name": name,
        "category": category,
        "type": "select",
        "currentValue": current,
        "options": options,
    }
