"""The runner: a loaded model, its KV cache and its kernels; runs one batch at a time."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from helexa.core.errors import HelexaError, ModelFileError
from helexa.neuron import ops
from helexa.neuron.engine.batch import lay_out
from helexa.neuron.engine.messages import EngineOptions
from helexa.neuron.engine.sampler import sample
from helexa.neuron.engine.scheduler import Plan
from helexa.neuron.layers.loader import Loader
from helexa.neuron.models import model_class
from helexa.neuron.weights.checkpoint import open_checkpoint

PAGE_SIZE = 64

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class DeviceError(HelexaError):
    """This machine, or its torch, has no such device that works."""


@dataclass(frozen=True)
class ModelFacts:
    """What a loaded model says of itself."""

    model_type: str
    vocab_size: int
    context_length: int
    parameters: int
    weight_bytes: int
    kv_bytes: int
    kv_pages: int


class Runner:
    """Runs plans on one device.

    Args:
        model_path: a model file or folder (see `open_checkpoint`).
        on_progress: called with (bytes read, bytes in all) while the weights load.

    Raises:
        ModelFileError: the model cannot be loaded, and why.
        DeviceError: the device cannot be used.
    """

    def __init__(
        self,
        model_path: Path,
        options: EngineOptions,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.device = _usable_device(options.device)
        dtype = _DTYPES.get(options.dtype) or ops.default_dtype(self.device)
        self.ops = ops.choose(self.device, dtype)
        with open_checkpoint(model_path) as checkpoint:
            config = checkpoint.config
            model_type = str(config.get("model_type"))
            loader = Loader(checkpoint, self.ops, lambda done: on_progress(done, checkpoint.total_bytes))
            try:
                self._model = model_class(model_type)(config, loader)
                trained_context = int(config.get("max_position_embeddings") or 2048)
            except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
                raise ModelFileError(f"{model_path.name}: its configuration is not sound: {error!r}") from error
            if trained_context < 1:
                raise ModelFileError(f"config: 'max_position_embeddings' is {trained_context}")
            weight_bytes = checkpoint.total_bytes
            parameters = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names())
        context = min(options.context_length or trained_context, trained_context)
        page_bytes = (
            2 * self._model.kv_heads * self._model.head_dim * PAGE_SIZE * dtype.itemsize * len(self._model.layers)
        )
        pages = self._page_budget(options, context, page_bytes)
        self._caches = [
            self.ops.new_cache(self._model.kv_heads, pages * PAGE_SIZE, self._model.head_dim)
            for _ in self._model.layers
        ]
        self.facts = ModelFacts(
            model_type=model_type,
            vocab_size=self._model.vocab_size,
            context_length=min(context, pages * PAGE_SIZE),
            parameters=parameters,
            weight_bytes=weight_bytes,
            kv_bytes=pages * page_bytes,
            kv_pages=pages,
        )

    @torch.inference_mode()
    def run(self, plan: Plan) -> list[int]:
        """Run one step; return a token for each entry that samples, in plan order."""
        sampling = [entry.sequence for entry in plan if entry.samples]
        logits = self.forward(plan)
        return sample(logits, sampling) if sampling else []

    @torch.inference_mode()
    def forward(self, plan: Plan) -> Tensor:
        """Logits [S, vocabulary] of the entries that sample, in plan order; K and V of all go to the cache."""
        return self._model.forward(lay_out(plan, PAGE_SIZE, self.device), self._caches, PAGE_SIZE)

    def _page_budget(self, options: EngineOptions, context: int, page_bytes: int) -> int:
        """Pages of the KV cache: as configured, else four full contexts, or a quarter of what memory is free."""
        if options.kv_cache_mb:
            return max(options.kv_cache_mb * 2**20 // page_bytes, 1)
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
            return max(int(free * 0.8) // page_bytes, 1)
        wanted = 4 * -(-context // PAGE_SIZE)
        return max(min(wanted, psutil.virtual_memory().available // 4 // page_bytes), 1)


def _usable_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise DeviceError(f"device '{name}' cannot be used: {reason}") from error
    return device
