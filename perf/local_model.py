"""Where the model of a benchmark lies."""

import asyncio
from pathlib import Path

from helexa.core.fleet import ModelSpec
from helexa.core.source import ModelSource
from helexa.neuron.builtin_models import source_text
from helexa.neuron.config import read_config
from helexa.neuron.sources.sources import Sources


def local_path(model: str) -> Path:
    """A path as it is, or the file of any model id that a node takes, fetched if it is not here yet.

    Raises:
        HelexaError: there is no such model.
    """
    if Path(model).exists():
        return Path(model)
    source = ModelSource.parse(source_text(ModelSpec(model_id=model)))
    return asyncio.run(Sources(read_config(None)).resolve(source, quant=None, progress=lambda *_: None))
