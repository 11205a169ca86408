"""The runner: a loaded model with its KV cache and kernels. It runs single steps."""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from helexa.core.logs import quoted
from helexa.neuron import tensors
from helexa.neuron.engine.execution.device_errors import OutOfStepError, is_device_fault
from helexa.neuron.engine.execution.image_encoder import ImageEncoder
from helexa.neuron.engine.execution.page_and_state_copies import CacheBytes
from helexa.neuron.engine.execution.ranks_and_stages import OtherProcesses
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import MemoryGrant, MemoryRequest
from helexa.neuron.engine.kv_cache_and_prefix_hashes import CacheKind
from helexa.neuron.engine.scheduling.draft_length import DraftLimits
from helexa.neuron.engine.step_input_and_graph_sizes import Int32, StepBuffers, StepInput, buckets, int32
from helexa.neuron.engine.step_output_logprobs_and_pooling import (
    MOST_ROWS,
    Logprobs,
    Readback,
    Sampled,
    ScoresReadback,
    StepInFlight,
    begin_scores,
    begin_sums,
)
from helexa.neuron.models.decoder import Decoder
from helexa.neuron.ops.batch import Batch, Bucket, Capacity
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.kernel_header import MAX_DRAFTS, PAGE_SIZE
from helexa.neuron.processes import heartbeat
from helexa.neuron.tensors import Tensor

_log = logging.getLogger("helexa.neuron.engine")


@dataclass(frozen=True)
class ModelFacts:
    """Sizes and limits of a runner's model, and the memory that is granted to it."""

    model_type: str
    vocab_size: int
    context_length: int  # maximum number of positions (tokens) of a sequence
    parameters: int  # number of the model's parameters
    weight_bytes: int  # bytes of the tensors in the model's files
    step_bytes: int  # bytes of weights that one decode step reads from memory, in the format of the kernels
    token_bytes: int  # bytes of K and V of one token in all layers
    # size of the whole KV cache, in bytes and in pages
    kv_bytes: int
    kv_pages: int
    state_bytes: int  # bytes of the recurrent state of one sequence; 0 for a model without recurrent layers
    snapshots: int  # number of snapshots of recurrent state for which memory is granted
    max_sequences: int  # maximum number of running sequences for which memory is granted
    memory_bytes: int  # bytes granted for the model, its caches and its steps
    quant: str  # format to which unquantized weights were quantized while loading; empty for no quantization
    token_seconds: float = 0.0  # duration of a step with one token, measured after loading
    # largest sliding window of the layers, in positions; None if a sequence must keep all parts of its KV pages
    window: int | None = None
    drafts: DraftLimits | None = None  # limits of the draft model; None without a draft model
    window_pages: int = 0  # number of window pages (see `WindowPages`); 0 if all layers have the same pages


class Runner:
    """Runs steps of a model on one device.

    The runner keeps no sequences: each step input is self-contained.

    Args:
        ops: the kernels with which the model was built.
        request: the memory request of the model, from which the runner takes sizes.
        grant: the memory grant: number of KV pages, sequences and snapshots to allocate.
        others: the other ranks of this host and the stages on other hosts; only the engine process has them.
    """

    facts: ModelFacts  # sizes of the model, set after loading
    encoder: ImageEncoder | None = None  # the encoder of images, set after loading; None if the model reads text only
    draft: "Runner | None" = None  # the runner of the draft model, set after loading; None without a draft model
    draft_head: "Runner | None" = None  # the runner of the draft head, set after loading; None without a draft head

    def __init__(
        self,
        model: Decoder,
        ops: Ops,
        options: EngineOptions,
        request: MemoryRequest,
        grant: MemoryGrant,
        others: Sequence[OtherProcesses] = (),
    ) -> None:
        self.device = ops.device
        self._others = others
        self.ops = ops
        self.buckets: list[Bucket] = []  # sizes of the graphs that `warm_up` captures or has captured
        self._model = model
        self._most_scored = min(MOST_ROWS, options.max_sequences)
        mixers = [block.mixer for block in model.blocks]
        slots = grant.sequences + grant.snapshots if request.state else 0
        self._pages, self.window_pages = grant.pages, request.window_pages_of(grant.pages)
        self._caches = model.new_caches(grant.pages, slots, self.window_pages or None)
        self._windowed: set[int] = set()  # ids of the caches of window pages
        if self.window_pages:
            windows = zip(self._caches, model.windows(), strict=True)
            self._windowed = {id(cache) for cache, window in windows if window is not None}
        self._states = [cache for mixer, cache in zip(mixers, self._caches, strict=True) if mixer.state_bytes]
        # Rows of the largest step: the token budget, or one token per sequence if this is more; plus drafts for each
        # sequence; plus the rest of an image that must be computed in one step.
        rows = max(options.max_step_tokens, grant.sequences) + MAX_DRAFTS * grant.sequences + request.image_rows
        width = min(-(-request.context // PAGE_SIZE) + 1, grant.pages)
        self._buffers = StepBuffers(Capacity(rows, grant.sequences, width), ops.device, packed=ops.fixed_addresses)
        self._is_whole_model = model.loader.stage.is_whole_model
        capturable = model.capturable or ops.captures_state
        if ops.fixed_addresses and options.graphs and capturable and self._is_whole_model:
            drafting = options.speculation_max_sequences if options.speculation else 0
            # A step with more than `drafting` decoding sequences has no drafts, so no bucket needs rows for its drafts.
            self.buckets = buckets(grant.sequences, drafting)

    @property
    def model(self) -> Decoder:
        """The part of the model that this process computes."""
        return self._model

    @property
    def pages(self) -> int:
        """Number of KV pages."""
        return self._pages

    @property
    def computes_alone(self) -> bool:
        """Whether no other process computes a part of the model."""
        return not self._others

    @property
    def counts_kernels(self) -> bool:
        """Whether kernels report progress, and this process computes the whole model."""
        return self.computes_alone and self.ops.counts_items

    @tensors.inference_mode()
    def launch(self, step: StepInput, after: StepInFlight | None = None, keep: bool = False) -> StepInFlight:
        """Launch one step, and return a handle from which its results can be read.

        On a GPU, this method returns before the step is computed.

        Args:
            step: input of the step. Its negative tokens are indices into the tokens that the previous step samples.
            after: handle of the previous step; None if `step` has no negative tokens.
            keep: whether to return the hidden states for a draft head (see `StepOutput.kept`).
        """
        last = None if after is None or after.sampled is None else after.sampled.tokens
        logits, sums, scores = self._compute_on_all_ranks(step, last)
        kept = self._model.kept.read(len(step.sample_rows)) if keep and self._model.kept is not None else None
        if step.sampling is None:
            return StepInFlight(hidden=sums, scores=scores, kept=kept)
        sampled = Sampled(self.ops, logits, step.sampling, last)
        logprobs = Logprobs(self.ops, logits, step.sampling.logprobs, sampled.tokens)
        return StepInFlight(sampled, logprobs, sums, scores, kept)

    @tensors.inference_mode()
    def follow(self, step: StepInput) -> None:
        """Compute this rank's part of a step that rank 0 planned. Only rank 0 samples."""
        self._compute_with_states(step, None)

    def _compute_on_all_ranks(
        self, step: StepInput, last: Tensor | None
    ) -> tuple[Tensor, dict[int, Readback], dict[int, ScoresReadback]]:
        """Run `_compute_with_states` on all ranks, and return the results of this rank."""
        if not self._others:
            return self._compute_with_states(step, last)
        try:
            for processes in self._others:
                # The other processes start first, so that all processes compute at the same time.
                processes.run(step)
            return self._compute_with_states(step, last)
        except Exception as error:  # the other processes now wait for an exchange that this process will not reach
            reason = str(error).partition("\n")[0]
            raise OutOfStepError(
                f"rank 0 failed in a step of all ranks, so the engine ends: {type(error).__name__}: {reason}; the node "
                "starts a new engine"
            ) from error

    def _compute_with_states(
        self, step: StepInput, last: Tensor | None
    ) -> tuple[Tensor, dict[int, Readback], dict[int, ScoresReadback]]:
        """Compute a step; return logits, sums of hidden states and prompt scores."""
        # In a group, all ranks must call this method, because the output head exchanges logits.
        self._copy_states(step.restores)
        logits, hidden = self.compute(step, last)
        # Snapshots are copied after the computation, because they must contain all tokens of the step.
        self._copy_states(step.saves)
        if not self._model.loader.stage.is_first:
            return logits, {}, {}  # only stage 0 of a pipeline has hidden states of the last layer
        sums = begin_sums(step.hidden, hidden)
        return logits, sums, begin_scores(self.ops, step.hidden, hidden, self._model.head, self._most_scored)

    def logits_of(self, step: StepInput) -> Tensor:
        """Compute a step on all ranks; return logits [S, vocabulary] (see `compute`)."""
        return self._compute_on_all_ranks(step, None)[0]

    def close(self) -> None:
        """End the other processes that compute the model, if any."""
        for processes in self._others:
            processes.close()

    @tensors.inference_mode()
    def compute(self, step: StepInput, last: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Compute a step on this rank only, and return its logits and hidden states.

        The method does not copy recurrent states. The next step may overwrite the results.

        Args:
            last: int64 [N], the N tokens that the previous step has sampled; None if `step` has no negative tokens.

        Returns:
            The logits [S, vocabulary] of the S rows that sample. The hidden states [P, H] of the P rows that embeddings
            and prompt log-probabilities need (H: hidden size), or None if P is 0.
        """
        model = self._model
        batch = self._buffers.load(step)
        if last is not None:
            batch.take_tokens(last)
        if batch.pooled:
            hidden = self.ops.run(lambda batch: model.hidden(batch, self._caches), batch, False)
            return model.head(hidden[: -batch.pooled]), hidden[-batch.pooled :]
        capturable = model.capturable or self.ops.captures_state
        use_graph = capturable and batch.embeddings is None and batch.positions.dim() == 1
        use_graph = use_graph and self._is_whole_model  # graphs cannot contain exchanges of hidden states between hosts
        logits = self.ops.run(self._forward, batch, use_graph)
        return logits[: batch.samples] if batch.bucket else logits, None

    def warm_up(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Capture graphs for all buckets. If one fails, later steps run without graphs.

        Args:
            on_progress: called before each capture with the number of captured graphs and the number of all graphs.
        """
        # The largest graph is captured first, because smaller graphs share its memory. If a rank cannot capture a
        # graph, all steps run without graphs on all ranks.
        sizes = sorted(self.buckets, reverse=True)
        for done, bucket in enumerate(sizes):
            on_progress(done, len(sizes))
            for processes in self._others:
                processes.capture(bucket)
            error = self.capture(bucket)
            for processes in self._others:
                error = processes.captured() or error
            if error is not None:
                fields = (quoted(error), bucket.rows, bucket.spans)
                _log.warning(
                    "graph capture failed, so all steps run without graphs and are slower error=%s rows=%d "
                    "sequences=%d; report the error, or set graphs = false to skip the capture",
                    *fields,
                )
                self.forget_graphs()
                return

    @tensors.inference_mode()
    def capture(self, bucket: Bucket) -> str | None:
        """Capture the graph of a bucket on this rank; return None, or why this failed.

        In a group, all ranks must capture the same buckets in the same order.

        Raises:
            RuntimeError: the device failed.
        """
        try:
            self.ops.capture(self._forward, self._buffers.load(StepInput.blank(bucket)))
        except RuntimeError as error:
            capture_unsupported = "captur" in str(error)  # the step cannot be captured, but the device works
            if not capture_unsupported and is_device_fault(error):
                raise
            return str(error)
        return None

    def forget_graphs(self) -> None:
        """Release all captured graphs, and compute later steps without graphs."""
        for processes in self._others:
            processes.forget_graphs()
        self.buckets = []
        self.ops.forget()

    def touch_caches(self) -> None:
        """Set the whole KV cache to zero, so that a lack of memory shows now."""
        for processes in self._others:
            processes.touch_caches()
        for cache in self._kv_caches():
            cache.zero_()
            # Writing large caches may take longer than the time after which the server kills an engine as hung.
            heartbeat.beat()

    def clear(self, pages: list[int]) -> None:
        """Set the contents of KV pages and window pages to zero.

        A number that is not smaller than the number of KV pages stands for a window page (see `PagePool.parts`).
        """
        # NaN in a page would affect later results even at masked positions.
        for processes in self._others:
            processes.clear(pages)
        if self.draft is not None:
            self.draft.clear([page for page in pages if page < self._pages])
        for windowed, first in ((False, 0), (True, self._pages)):
            chosen = [page - first for page in pages if (page >= self._pages) == windowed]
            for cache in self._by_page(windowed) if chosen else ():
                cache[chosen] = 0

    @property
    def reads_caches(self) -> bool:
        """Whether `read_cache` and `write_cache` reach the caches of all processes."""
        return all(processes.reads_caches for processes in self._others)

    @cached_property
    def page_parts(self) -> list[int]:
        """Bytes of a KV page in each rank, without its window page."""
        return [len(part) for part in self.read_cache("page", 0)]

    @cached_property
    def window_parts(self) -> list[int]:
        """Bytes of a window page in each rank; empty if all layers have the same pages."""
        return [len(part) for part in self.read_cache("window", 0)] if self.window_pages else []

    @cached_property
    def state_parts(self) -> list[int]:
        """Bytes of a state slot in each rank; empty without recurrent layers."""
        return [len(part) for part in self.read_cache("state", 0)] if self._states else []

    def read_cache(self, kind: CacheKind, index: int) -> list[bytes]:
        """Return each rank's bytes of a KV page, window page or state slot of all layers."""
        own = self._cache_bytes[kind].read(index)
        return [own, *(part for processes in self._others for part in processes.read_cache(kind, index))]

    def write_cache(self, kind: CacheKind, index: int, contents: bytes) -> bool:
        """Replace the contents of a KV page, a window page or a state slot on all ranks.

        `contents` are the bytes of all ranks, as `read_cache` returns them, joined in the order of the ranks. Return
        False, and change nothing, if `contents` has a wrong size.
        """
        sizes = {"page": self.page_parts, "window": self.window_parts, "state": self.state_parts}[kind]
        if len(contents) != sum(sizes):
            return False
        ends = list(accumulate(sizes))
        own, *others = (memoryview(contents)[end - size : end] for size, end in zip(sizes, ends, strict=True))
        for processes in self._others:  # at most one object, because the caches of other hosts are never written
            processes.write_cache(kind, index, others)
        self.write_own_cache(kind, index, own)
        return True

    def write_own_cache(self, kind: CacheKind, index: int, contents: bytes | memoryview) -> None:
        """Replace this rank's part of a KV page, a window page or a state slot."""
        self._cache_bytes[kind].write(index, contents)

    @cached_property
    def _cache_bytes(self) -> dict[CacheKind, CacheBytes]:
        on_cpu = self.device.type == "cpu"
        states = [part for state in self._states for part in state.parts()]
        return {
            "page": CacheBytes(list(self._by_page(windowed=False)), on_cpu),
            "window": CacheBytes(list(self._by_page(windowed=True)), on_cpu),
            "state": CacheBytes(states, on_cpu),
        }

    def _by_page(self, windowed: bool) -> Iterator[Tensor]:
        """Yield each KV cache as a tensor whose first dimension is the page.

        Args:
            windowed: whether to yield the caches of window pages, or the other caches.
        """
        for cache in self._kv_caches():  # int8 and native caches: [pages, ...]; others: [2, heads, slots, head_dim]
            if (id(cache) in self._windowed) == windowed:
                yield cache if cache.dim() == 3 else cache.unflatten(2, (-1, PAGE_SIZE)).movedim(2, 0)

    def _kv_caches(self) -> Collection[Tensor]:
        # Layers without keys of their own share the cache of an earlier layer. The result has each cache once.
        return {id(cache): cache for cache in self._caches if isinstance(cache, Tensor)}.values()

    @tensors.inference_mode()
    def computes_finite_logits(self, parts: Sequence[int], slot: int | None) -> bool:
        """Test the device: return whether the logits of one token are all finite.

        Args:
            parts: the parts of a KV page whose contents are no longer needed (see `PagePool.parts`). The test sets them
                to zero.
            slot: a state slot whose contents are no longer needed; None for a model without recurrent layers.
        """
        if self.device.type == "cuda":
            tensors.cuda.synchronize(self.device)  # a step in flight may still use the input buffers
        page, window_page = parts[0], parts[-1] - self._pages
        logits = self.logits_of(
            StepInput(
                tokens=int32([self._model.bos_token]),
                positions=int32([0]),
                slots=int32([page * PAGE_SIZE]),
                sample_rows=int32([0]),
                starts=int32([0, 1]),
                prefixes=int32([0]),
                settled=int32([1]),
                state_slots=int32([slot or 0]),
                pages=int32([[page]]),
                window_pages=int32([[window_page]]) if self.window_pages else None,
                window_slots=int32([window_page * PAGE_SIZE]) if self.window_pages else None,
            )
        )
        self.clear([*parts])
        return bool(logits.isfinite().all())

    def _forward(self, batch: Batch) -> Tensor:
        return self._model.forward(batch, self._caches)

    def _copy_states(self, pairs: Int32) -> None:
        for source, target in pairs.tolist():
            for state in self._states:
                state.copy(source, target)
