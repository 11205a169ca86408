"""Where the model of a benchmark lies."""

import asyncio
from pathlib import Path

from helexa.core.source import ModelSource
from helexa.neuron.config import read_config
from helexa.neuron.registry import BUILTIN_MODELS
from helexa.neuron.sources import Sources


def local_path(model: str) -> Path:
    """A path as it is, or the file of any model id that a node takes, fetched if it is not here yet.

    Raises:
        HelexaError: there is no such model.
    """
    if Path(model).exists():
        return Path(model)
    source = ModelSource.parse(BUILTIN_MODELS.get(model, model))
    return asyncio.run(Sources(read_config(None)).resolve(source, quant=None, progress=lambda *_: None))
