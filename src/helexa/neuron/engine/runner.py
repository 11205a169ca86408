"""The runner: a loaded model, its KV cache and its kernels; runs one batch at a time."""

import gc
import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron import heartbeat
from helexa.neuron.engine.device import kernels_for, policy_for, usable_device
from helexa.neuron.engine.faults import is_device_fault
from helexa.neuron.engine.fit import LEAST_CONTEXT, alone
from helexa.neuron.engine.launched import Launched, Outcome, begin_sums
from helexa.neuron.engine.layout import Layout
from helexa.neuron.engine.logprobs import Logprobs
from helexa.neuron.engine.measured import largest, measured
from helexa.neuron.engine.messages import EngineOptions, Generate, Grant, Needs, SamplingParams
from helexa.neuron.engine.needs import needs
from helexa.neuron.engine.outline import outline
from helexa.neuron.engine.packed_layout import PackedLayout, buckets
from helexa.neuron.engine.plan import Plan, PlanEntry
from helexa.neuron.engine.prompt_scores import MOST_ROWS, begin_scores
from helexa.neuron.engine.sampler import launch, rows_of
from helexa.neuron.engine.sequence import Sequence
from helexa.neuron.layers.loader import Loader
from helexa.neuron.models import model_class
from helexa.neuron.ops.batch import Batch, Capacity
from helexa.neuron.ops.constants import MAX_DRAFTS, PAGE_SIZE
from helexa.neuron.weights.checkpoint import open_checkpoint

__all__ = ["PAGE_SIZE", "ModelFacts", "NotFiniteError", "Runner", "load"]

_log = logging.getLogger("helexa.neuron.engine")


class NotFiniteError(ModelFileError):
    """A loaded model computes logits that are not finite numbers."""


@dataclass(frozen=True)
class ModelFacts:
    """What a loaded model says of itself.

    Attributes:
        weight_bytes: of its tensors in their files.
        step_bytes: of the weights that one decode step reads, as the kernels hold them.
        token_bytes: of K and V of one token in all layers.
        kv_bytes, kv_pages: of the whole cache.
        state_bytes: of what recurrent layers keep of one sequence; 0 for a model without such.
        quant: what plain weights became while they loaded, empty if they stayed as they were.
        snapshots: of that state that there is room for.
        max_sequences: that there is room for.
        token_seconds: that a step of one token took when the model had been loaded.
        memory_bytes: granted for all of this, and for steps.
    """

    model_type: str
    vocab_size: int
    context_length: int
    parameters: int
    weight_bytes: int
    step_bytes: int
    token_bytes: int
    kv_bytes: int
    kv_pages: int
    state_bytes: int
    snapshots: int
    max_sequences: int
    memory_bytes: int
    quant: str
    token_seconds: float = 0.0


class Runner:
    """Runs plans on one device.

    Args:
        model_path: a model file or folder (see `open_checkpoint`).
        on_progress: called with (bytes read, bytes in all) while the weights load.
        ask: for memory, before any weight is read.

    Raises:
        DoesNotFitError: there is not enough memory, with the numbers.
        ModelFileError: the model cannot be loaded, and why.
        NotFiniteError: it can, but what it computes in this dtype are no numbers.
        DeviceError: the device cannot be used.
    """

    def __init__(
        self,
        model_path: Path,
        options: EngineOptions,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        ask: Callable[[Needs], Grant] = alone,
    ) -> None:
        self.device = usable_device(options.device)
        with open_checkpoint(model_path) as checkpoint:
            model_type = str(checkpoint.config.get("model_type"))
            architecture = model_class(model_type)
            config = {**architecture.defaults, **checkpoint.config}
            try:
                self.ops = kernels_for(self.device, options, config, architecture.half)
                policy = policy_for(options, checkpoint, int(config.get("num_hidden_layers") or 0), self.ops)
                asked = needs(outline(checkpoint, architecture, config, self.ops, policy), options, self.ops)
                grant = ask(asked)
                store = self.ops.store(model_path, policy.quant)

                def on_read(done: int) -> None:
                    on_progress(done, checkpoint.total_bytes)

                loader = Loader(checkpoint, self.ops, on_read, store, policy)
                self._model = architecture(config, loader)
            except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
                raise ModelFileError(f"{model_path.name}: its configuration is not sound: {error!r}") from error
            if store is not None:
                store.save()
            weight_bytes = checkpoint.total_bytes
            parameters = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names())
        self._options = options
        if self.device.type == "cuda":
            asked = self._measured(asked, grant.sequences, lambda: on_progress(weight_bytes, weight_bytes))
            grant = ask(asked)
        self._allocate(asked, grant)
        context, pages, sequences = asked.context, grant.pages, grant.sequences
        if options.kv_cache_mb:  # whoever states a size is not to find out later that it is not there
            for cache in self._caches:
                if isinstance(cache, Tensor):
                    cache.zero_()
                heartbeat.beat()
        self.facts = ModelFacts(
            model_type=model_type,
            vocab_size=self._model.vocab_size,
            context_length=min(context, pages * PAGE_SIZE),
            parameters=parameters,
            weight_bytes=weight_bytes,
            step_bytes=self.ops.step_bytes,
            token_bytes=asked.page // PAGE_SIZE,
            kv_bytes=pages * asked.page,
            kv_pages=pages,
            state_bytes=asked.state,
            snapshots=grant.snapshots,
            max_sequences=sequences,
            memory_bytes=grant.total,
            quant=policy.quant,
        )
        if self._model.recurrent:
            state = asked.state / 2**20
            _log.info("recurrent state: %.1f MiB a sequence, room for %d snapshots", state, grant.snapshots)
        begun = time.perf_counter()
        bos = config.get("bos_token_id")
        self._probe_token = bos if type(bos) is int and 0 <= bos < self._model.vocab_size else 0
        if not self.computes_finite_logits(0, 0):
            dtype = str(self.ops.dtype).removeprefix("torch.")
            raise NotFiniteError(f"{model_path.name}: its logits are not finite numbers in {dtype}")
        self.facts = replace(self.facts, token_seconds=time.perf_counter() - begun)

    def _allocate(self, asked: Needs, grant: Grant) -> None:
        """Make room for keys, values, states and the numbers of steps."""
        mixers = [block.mixer for block in self._model.blocks]
        slots = grant.sequences + grant.snapshots if asked.state else 0
        self._caches = [mixer.new_cache(grant.pages, slots) for mixer in mixers]
        self._states = [cache for mixer, cache in zip(mixers, self._caches, strict=True) if mixer.state_bytes]
        rows = max(self._options.max_step_tokens, grant.sequences) + MAX_DRAFTS * grant.sequences
        width = min(-(-asked.context // PAGE_SIZE) + 1, grant.pages)
        capacity = Capacity(rows, grant.sequences, width)
        if not self.ops.tabled:
            self._layout = Layout(capacity, self.device)
            return
        recordable = self._options.graphs and (self._model.recorded or self.ops.records_state)
        drafting = self._options.speculation_max_sequences if self._options.speculation else 0
        sizes = buckets(grant.sequences, drafting) if recordable else []
        self._layout = PackedLayout(capacity, self.device, sizes)

    def _measured(self, asked: Needs, sequences: int, on_step: Callable[[], None] = lambda: None) -> Needs:
        """Needs by what the largest steps take, with a cache just large enough for them.

        Args:
            on_step: called after each, which may have taken minutes: the first time, kernels are compiled.
        """
        weights = torch.cuda.memory_allocated()
        tokens = min(self._options.max_step_tokens, asked.context)
        pages = max(asked.pages_for(tokens), asked.pages_for(min(asked.context, LEAST_CONTEXT)))
        self._allocate(asked, Grant(total=0, pages=pages, sequences=sequences, snapshots=0))

        def run() -> None:
            for plan in largest(tokens, sequences, PAGE_SIZE):
                self.run(plan)
                on_step()

        graphs = isinstance(self._layout, PackedLayout) and bool(self._layout.buckets)
        found = measured(asked, weights, run, graphs)
        self._caches, self._states = [], []
        settings = self._model.settings  # contexts were short, and have few parts
        parts = self.ops.parts_bytes(sequences, settings.heads, settings.kv_heads, settings.head_dim)
        found = msgspec.structs.replace(found, step=found.step + parts * (2 if graphs else 1))
        if self.ops.gathers:
            found = msgspec.structs.replace(found, page_step=asked.page_step, position_step=asked.position_step)
        mebibytes = [size >> 20 for size in (weights, found.step, found.free)]
        _log.info("measured: weights %d MiB, steps %d MiB, of %d MiB free", *mebibytes)
        return found

    def run(self, plan: Plan) -> Outcome:
        """Run one step."""
        return self.launch(plan).read()

    @torch.inference_mode()
    def launch(self, plan: Plan, after: Launched | None = None) -> Launched:
        """Have the device run one step; on a GPU this returns before it has.

        Args:
            after: the step before, of which this one takes tokens; its sequences stand `as_after` it.
        """
        rows = rows_of(plan)
        self._copy_states((entry.restore, entry.sequence.slot) for entry in plan)
        last = None if after is None or after.sampled is None else after.sampled.tokens
        logits, hidden = self.compute(plan, last)
        self._copy_states((entry.sequence.slot, entry.save) for entry in plan)
        sums = begin_sums(plan, hidden)
        scores = begin_scores(plan, hidden, self._model.head, min(MOST_ROWS, self._options.max_sequences))
        if not rows:
            return Launched(plan, hidden=sums, scores=scores)
        logprobs = Logprobs(logits, rows)
        sampled = launch(self.ops, logits, rows, last)
        logprobs.begin(sampled.tokens)
        return Launched(plan, sampled, logprobs, sums, scores)

    def forward(self, plan: Plan) -> Tensor:
        """Logits [S, vocabulary] of the entries that sample, in plan order; K and V of all go to the cache."""
        return self.compute(plan)[0]

    @torch.inference_mode()
    def compute(self, plan: Plan, last: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """What `forward` returns, and the hidden states [P, H] that are pooled or scored, if any, in plan order.

        Args:
            last: int64 [N], the tokens that the step before yields, if any are still to come from there.
        """
        model = self._model
        batch = self._layout.lay_out(plan)
        if last is not None:
            batch.take_tokens(last)
        if not batch.pooled:
            logits = self.ops.run(self._forward, batch, model.recorded)
            return logits[: batch.samples] if batch.bucket else logits, None
        hidden = self.ops.run(lambda batch: model.hidden(batch, self._caches), batch, False)
        return model.head(hidden[: -batch.pooled]), hidden[-batch.pooled :]

    @torch.inference_mode()
    def warm_up(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Record the steps that are to be recorded, the largest first, whose memory the others share.

        Args:
            on_progress: called with (recorded, in all).
        """
        if not isinstance(self._layout, PackedLayout):
            return
        sizes = sorted(self._layout.buckets)
        for done, bucket in enumerate(reversed(sizes)):
            on_progress(done, len(sizes))
            try:
                self.ops.record(self._forward, self._layout.blank(bucket))
            except RuntimeError as error:
                refused = "captur" in str(error)  # it does what a recording must not, and no harm is done
                if not refused and is_device_fault(error):
                    raise
                _log.warning("steps of this model cannot be recorded, and are slower: %s", error)
                self._layout.buckets = []
                self.ops.forget()
                return

    def _forward(self, batch: Batch) -> Tensor:
        return self._model.forward(batch, self._caches)

    def clear(self, pages: list[int]) -> None:
        """Make zeros of what pages hold: what is no number would spread, even from behind a mask."""
        for cache in self._caches:
            if isinstance(cache, Tensor):  # the native kernels' pages lie one after another
                by_page = cache if cache.dim() == 3 else cache.unflatten(2, (-1, PAGE_SIZE)).movedim(2, 0)
                by_page[pages] = 0

    @torch.inference_mode()
    def computes_finite_logits(self, page: int, slot: int | None) -> bool:
        """Compute one token; return whether all its logits are finite.

        Args:
            page: a KV page that no sequence reads any more; it is zero afterwards.
            slot: a slot for recurrent state that no sequence reads any more, where the model has such state.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a step in flight still reads its inputs
        request = Generate(id=0, prompt=[self._probe_token], max_tokens=1, sampling=SamplingParams())
        logits = self.forward([PlanEntry(Sequence(request, pages=[page], slot=slot), 1)])
        self.clear([page])
        return bool(logits.isfinite().all())

    def _copy_states(self, pairs: Iterable[tuple[int | None, int | None]]) -> None:
        for source, target in pairs:
            if source is not None and target is not None:
                for state in self._states:
                    state.copy(source, target)


def load(
    model_path: Path,
    options: EngineOptions,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    ask: Callable[[Needs], Grant] = alone,
) -> Runner:
    """A runner that computes finite numbers: in float32 if nothing else does. See `Runner`."""
    try:
        return Runner(model_path, options, on_progress, ask)
    except NotFiniteError as error:
        if options.dtype == "float32":
            raise
        _log.warning("%s; it is loaded again in float32", str(error))  # whoever kept the error would keep the model
    gc.collect()
    torch.cuda.empty_cache()  # else torch keeps what the first one held, and there seems to be no room for the second
    return Runner(model_path, msgspec.structs.replace(options, dtype="float32"), on_progress, ask)
