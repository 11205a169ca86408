"""Finds or downloads the model file for a benchmark."""

import asyncio
from pathlib import Path

from helexa.core.model_source_ids import ModelSource
from helexa.core.node_reports import ModelSpec
from helexa.neuron.builtin_models import source_text
from helexa.neuron.config import read_config
from helexa.neuron.sources.hubs_and_sources import Sources


def local_path(model: str) -> Path:
    """Return the local path of a model. `model` is a path, or a model id, whose files are downloaded if missing.

    Raises:
        HelexaError: the model does not exist.
    """
    if Path(model).exists():
        return Path(model)
    source = ModelSource.parse(source_text(ModelSpec(model_id=model)))
    return asyncio.run(Sources(read_config(None)).resolve(source, quant=None, progress=lambda *_: None))
