"""Optional log of all prompts as the engine receives them: after the chat template, with special tokens.

The log is off by default, because prompts are private data of the clients. The option `prompts` in the table `[log]` of
neuron.toml enables it. The log level alone never enables it.
"""

import logging
from collections.abc import Sequence

from helexa.core.logs import tell
from helexa.neuron.lifecycle.model import ServedModel

_log = logging.getLogger("helexa.neuron.prompts")
_log.disabled = True


def enable() -> None:
    """Log all prompts from now on."""
    _log.disabled = False
    _log.warning("[log] prompts = true: this log contains the prompts of all clients")


def log_prompt(model: ServedModel, prompt: Sequence[int]) -> None:
    """Log the text of a prompt, if the log of prompts is enabled.

    Args:
        model: the model that the request uses.
        prompt: token ids of the prompt.
    """
    if _log.isEnabledFor(logging.INFO):
        text = model.text.tokenizer.decode(prompt, skip_special=False)
        tell(_log, logging.INFO, "prompt", model=model.id, tokens=len(prompt), text=text)
