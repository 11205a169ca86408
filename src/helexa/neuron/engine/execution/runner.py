"""The runner: a loaded model, its KV cache and its kernels. It runs one step at a time."""

import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from helexa.neuron.engine.execution.buckets import buckets
from helexa.neuron.engine.execution.device_errors import OutOfStepError, is_device_fault
from helexa.neuron.engine.execution.image_encoder import ImageEncoder
from helexa.neuron.engine.execution.model_facts import ModelFacts
from helexa.neuron.engine.execution.other_processes import OtherProcesses
from helexa.neuron.engine.execution.step_buffers import StepBuffers
from helexa.neuron.engine.execution.step_in_flight import StepInFlight, begin_sums
from helexa.neuron.engine.ipc.messages import EngineOptions, MemoryGrant, MemoryRequest
from helexa.neuron.engine.sampling.logprobs import Logprobs
from helexa.neuron.engine.sampling.step_sampler import launch
from helexa.neuron.engine.step.prompt_scores import MOST_ROWS, ScoresReadback, begin_scores
from helexa.neuron.engine.step.readback import Readback
from helexa.neuron.engine.step.step_input import Int32, StepInput, int32
from helexa.neuron.engine.step.step_output import StepOutput
from helexa.neuron.models.decoder import Decoder
from helexa.neuron.ops.batch import Batch, Bucket, Capacity
from helexa.neuron.ops.constants import MAX_DRAFTS, PAGE_SIZE
from helexa.neuron.ops.protocol import Ops
from helexa.neuron.processes import heartbeat

_log = logging.getLogger("helexa.neuron.engine")


class Runner:
    """Runs steps of a model on one device. The runner keeps no sequences: each step input is self-contained.

    Args:
        ops: the kernels with which the model was built.
        request: the memory request of the model, from which the runner takes sizes.
        grant: the memory grant: number of KV pages, sequences and snapshots to allocate.
        others: the other ranks of this host and the stages on other hosts; only the engine process has them.

    Attributes:
        facts: sizes of the model, set after loading.
        encoder: the encoder of images, set after loading; None if the model reads text only.
        buckets: sizes of the graphs that `warm_up` captures or has captured.
    """

    facts: ModelFacts
    encoder: ImageEncoder | None = None

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
        self.buckets: list[Bucket] = []
        self._model = model
        self._most_scored = min(MOST_ROWS, options.max_sequences)
        mixers = [block.mixer for block in model.blocks]
        slots = grant.sequences + grant.snapshots if request.state else 0
        self._caches = [mixer.new_cache(grant.pages, slots) for mixer in mixers]
        self._states = [cache for mixer, cache in zip(mixers, self._caches, strict=True) if mixer.state_bytes]
        rows = max(options.max_step_tokens, grant.sequences) + MAX_DRAFTS * grant.sequences + request.image_rows
        width = min(-(-request.context // PAGE_SIZE) + 1, grant.pages)
        self._buffers = StepBuffers(Capacity(rows, grant.sequences, width), ops.device, packed=ops.tabled)
        self._is_whole_model = model.loader.stage.is_whole_model
        capturable = model.capturable or ops.captures_state
        if ops.tabled and options.graphs and capturable and self._is_whole_model:
            drafting = options.speculation_max_sequences if options.speculation else 0
            self.buckets = buckets(grant.sequences, drafting)

    def run(self, step: StepInput) -> StepOutput:
        """Run one step and return its output."""
        return self.launch(step).read()

    @property
    def computes_alone(self) -> bool:
        """Whether no other process computes a part of the model."""
        return not self._others

    @property
    def counts_kernels(self) -> bool:
        """Whether the progress count grows within kernels, and no other process computes a part of the model."""
        return self.computes_alone and self.ops.counts_items

    @torch.inference_mode()
    def launch(self, step: StepInput, after: StepInFlight | None = None) -> StepInFlight:
        """Launch one step, and return a handle from which its results can be read.

        On a GPU, this method returns before the step is computed.

        Args:
            step: input of the step. Its negative tokens are indices into the tokens that the previous step samples.
            after: handle of the previous step; None if `step` has no negative tokens.
        """
        last = None if after is None or after.sampled is None else after.sampled.tokens
        logits, sums, scores = self._advance_all(step, last)
        if step.sampling is None:
            return StepInFlight(hidden=sums, scores=scores)
        logprobs = Logprobs(logits, step.sampling.logprobs)
        sampled = launch(self.ops, logits, step.sampling, last)
        logprobs.begin(sampled.tokens)
        return StepInFlight(sampled, logprobs, sums, scores)

    @torch.inference_mode()
    def follow(self, step: StepInput) -> None:
        """Compute a step of rank 0 in the process of another rank. Only rank 0 samples."""
        self._advance(step, None)

    def _advance_all(
        self, step: StepInput, last: Tensor | None
    ) -> tuple[Tensor, dict[int, Readback], dict[int, ScoresReadback]]:
        """Compute a step on all ranks, and return the results of `_advance` on this rank.

        Raises:
            OutOfStepError: this process, or the connection to another process, failed in a step of all processes.
        """
        if not self._others:
            return self._advance(step, last)
        try:
            for processes in self._others:
                processes.run(step)
            return self._advance(step, last)
        except Exception as error:  # the other processes wait for an exchange that this process has not reached
            reason = str(error).partition("\n")[0]
            raise OutOfStepError(f"rank 0 failed in a step of all ranks: {type(error).__name__}: {reason}") from error

    def _advance(
        self, step: StepInput, last: Tensor | None
    ) -> tuple[Tensor, dict[int, Readback], dict[int, ScoresReadback]]:
        """Compute a step without sampling: return its logits, sums of hidden states and prompt scores.

        In a group, all ranks must call this method, because the output head exchanges logits.
        """
        self._copy_states(step.restores)
        logits, hidden = self.compute(step, last)
        self._copy_states(step.saves)
        if not self._model.loader.stage.is_first:
            return logits, {}, {}  # only stage 0 of a pipeline has hidden states of the last layer
        sums = begin_sums(step.hidden, hidden)
        return logits, sums, begin_scores(step.hidden, hidden, self._model.head, self._most_scored)

    def forward(self, step: StepInput) -> Tensor:
        """Compute a step, and return the logits [S, vocabulary] of its S rows that sample.

        The step writes K and V of all rows to the KV cache.
        """
        return self._advance_all(step, None)[0]

    def close(self) -> None:
        """End the other processes that compute the model, if any."""
        for processes in self._others:
            processes.close()

    @torch.inference_mode()
    def compute(self, step: StepInput, last: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Compute a step and return its logits and hidden states.

        Args:
            step: input of the step.
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
        use_graph = use_graph and self._is_whole_model  # hidden states are exchanged in the middle of a pass
        logits = self.ops.run(self._forward, batch, use_graph)
        return logits[: batch.samples] if batch.bucket else logits, None

    def warm_up(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Capture graphs for all buckets. The largest graph is captured first, because smaller graphs share its memory.

        If a rank cannot capture a graph, all steps run without graphs on all ranks.

        Args:
            on_progress: called before each capture with the number of captured graphs and the number of all graphs.
        """
        sizes = sorted(self.buckets, reverse=True)
        for done, bucket in enumerate(sizes):
            on_progress(done, len(sizes))
            for processes in self._others:
                processes.capture(bucket)
            refusal = self.capture(bucket)
            for processes in self._others:
                refusal = processes.captured() or refusal
            if refusal is not None:
                _log.warning("the steps of this model cannot be captured as graphs, and are slower: %s", refusal)
                self.forget_graphs()
                return

    @torch.inference_mode()
    def capture(self, bucket: Bucket) -> str | None:
        """Capture the graph of a bucket on this rank. In a group, all ranks must capture the same buckets in turn.

        Returns:
            Why the graph cannot be captured; None if it was captured.

        Raises:
            RuntimeError: the device failed.
        """
        try:
            self.ops.capture(self._forward, self._buffers.load(StepInput.blank(bucket)))
        except RuntimeError as error:
            capture_unsupported = "captur" in str(error)  # the pass cannot be captured; the device still works
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
        """Write to the whole KV cache, so that a lack of memory causes an error now and not during a request."""
        for processes in self._others:
            processes.touch_caches()
        for cache in self._caches:
            if isinstance(cache, Tensor):
                cache.zero_()
            heartbeat.beat()

    def clear(self, pages: list[int]) -> None:
        """Set the contents of KV pages to zero. NaN in a page would affect later results even at masked positions."""
        for processes in self._others:
            processes.clear(pages)
        for cache in self._by_page():
            cache[pages] = 0

    def fill_with_nan(self, page: int) -> None:
        """Set the contents of a KV page on this rank to NaN, for fault injection."""
        for cache in self._by_page():
            cache[page] = 255 if cache.dtype == torch.uint8 else torch.nan  # 255: NaN in bfloat16 and in float32

    def _by_page(self) -> Iterator[Tensor]:
        """Yield each layer's KV cache as a tensor whose first dimension is the page."""
        for cache in self._caches:
            if isinstance(cache, Tensor):  # int8 and native caches: [pages, ...]; others: [2, heads, slots, D]
                yield cache if cache.dim() == 3 else cache.unflatten(2, (-1, PAGE_SIZE)).movedim(2, 0)

    @torch.inference_mode()
    def computes_finite_logits(self, page: int, slot: int | None) -> bool:
        """Test the device: compute one token, and return whether all of its logits are finite.

        Args:
            page: a KV page whose contents are no longer needed. The test sets the page to zero.
            slot: a state slot whose contents are no longer needed; None for a model without recurrent layers.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the buffers may belong to a step in flight
        logits = self.forward(
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
            )
        )
        self.clear([page])
        return bool(logits.isfinite().all())

    def _forward(self, batch: Batch) -> Tensor:
        return self._model.forward(batch, self._caches)

    def _copy_states(self, pairs: Int32) -> None:
        for source, target in pairs.tolist():
            for state in self._states:
                state.copy(source, target)
