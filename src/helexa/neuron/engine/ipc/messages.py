"""The messages between the server process and an engine process; `frames` sends them over a Unix socket.

They contain only numbers, token ids and grammars. The struct types are the whole protocol: an engine accepts no other
request.
"""

from typing import Annotated, Literal

import msgspec

from helexa.neuron.ops.constants import Kernels
from helexa.neuron.text.pooling import Pooling

DEBUG_FAULT = "NEURON_DEBUG_FAULT"
"""The environment variable that injects faults into engines; see `debug_fault`."""

PLAN_LOG = "NEURON_DEBUG_PLAN_LOG"
"""The environment variable that names a folder for plan logs; see `recorded_scheduler`."""

FinishReason = Literal["stop", "length", "error"]
Activations = Literal["auto", "int16", "int8"]
PrefixReuse = Literal["principal", "all", "off"]
StepTiming = Literal["measured", "fixed"]
Logprob = tuple[float, list[tuple[int, float]]]
"""The log-probability of a token, and the likeliest tokens at its position with their log-probabilities."""


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine runs its model.

    Attributes:
        device: `cpu`, `cuda:N` or `mps`.
        dtype: activation dtype, `auto`, `float32`, `bfloat16` or `float16`.
        kernels: `auto` for the fastest that work, `torch` for plain torch only, `triton` for the GPU kernels. On a CPU,
            the GPU kernels run in Triton's interpreter, slowly.
        quant: target format of unquantized weights while they load, one of the names in `weights.quant_form`; empty for
            no quantization.
        threads: CPU threads, 0 for one per physical core.
        max_step_tokens: token budget of one step, shared by all sequences. Decoding sequences get one token each even
            beyond the budget.
        max_prefill_beside_decode: maximum prompt tokens in a step with decoding sequences, which wait for the end of
            the step. The engine uses fewer if the step would take much longer than decoding alone. 0 for no limit.
        max_sequences: maximum number of sequences in one step.
        max_waiting: maximum number of waiting sequences; further requests are rejected.
        context_length: positions per sequence, 0 for the length that the model was trained on.
        kv_cache_mb: size of the KV cache in MiB, 0 to size the cache from free memory.
        memory_limit_mb: MiB of the device's memory that all models of the node may take together, 0 for all free
            memory.
        snapshot_mb: MiB for snapshots of recurrent state, from which prompts with the same beginning continue; 0 for a
            part of free memory.
        activations: integer type to which the native CPU kernels round the input of products with quantized weights:
            `int16`, `int8`, or `auto` to choose by model.
        kv_dtype: dtype of the KV cache: `auto` for the activation dtype, or `int8`, which plain torch does not support.
        speculation: draft tokens that repeat parts of the prompt or output, and compute several tokens at a time. The
            output does not change.
        speculation_max_sequences: maximum number of decoding sequences with drafts; with more, nothing is drafted.
        graphs: capture decode steps as graphs and replay them, if the kernels support it.
        overlap: launch a step before the previous step is read; None to do so on GPUs only.
        prefix_reuse: which prompts share KV pages of a common beginning: prompts with the same salt (`principal`),
            `all`, or none (`off`).
        step_timing: `measured` limits steps by the time that earlier steps took. `fixed` assumes nominal times, so that
            the same requests in the same order get the same plans.
    """

    device: str = "cpu"
    dtype: str = "auto"
    kernels: Kernels = "auto"
    quant: str = ""
    threads: int = 0
    max_step_tokens: int = 512
    max_prefill_beside_decode: int = 128
    max_sequences: int = 64
    max_waiting: int = 256
    context_length: int = 0
    kv_cache_mb: int = 0
    memory_limit_mb: int = 0
    snapshot_mb: int = 0
    activations: Activations = "auto"
    kv_dtype: Literal["auto", "int8"] = "auto"
    prefix_reuse: PrefixReuse = "principal"
    speculation: bool = True
    speculation_max_sequences: int = 4
    graphs: bool = True
    overlap: bool | None = None
    step_timing: StepTiming = "measured"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one sequence are chosen. The defaults are plain softmax sampling at temperature 1.

    Attributes:
        temperature: 0 is greedy.
        top_p, min_p: probability bounds of the sampled tokens; 1 and 0 turn them off.
        top_k: number of likeliest tokens to sample from; 0 is off.
        repetition_penalty: penalty over prompt and output (Keskar et al., CTRL, 2019); 1 is off.
        frequency_penalty, presence_penalty: penalties over the output, as OpenAI defines them.
        seed: with the position, it determines every draw, independent of other sequences in the batch. Logits may still
            differ in their last bits between batch sizes.
        logit_bias: token id -> added logit.
        logprobs: number of alternatives to report with the log-probability of each token; None reports neither.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    logit_bias: dict[int, float] = {}
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """Server -> engine: continue `prompt` by at most `max_tokens` tokens; with 0 the sequence ends with its prompt.

    The end-of-sequence token that ends a sequence is reported in the last `TokenOutput` like any other token.

    Attributes:
        stop_ids: tokens that end the sequence.
        salt: the principal as one word, empty for anonymous clients. Principals share the engine fairly. By default,
            only sequences of the same principal share pages of the KV cache.
        turn: number of leading prompt tokens that stay if the client replaces the last turn; 0 if unknown. A model with
            recurrent layers saves a snapshot there.
        prior_output: number of tokens at the prompt's end that are output of an earlier request.
        grammar: grammar of the output as llguidance's JSON; empty for none. The sequence ends when the grammar is
            complete.
        prompt_logprobs: number of alternatives to report with the log-probability of each prompt token; None reports
            neither. Otherwise the prompt uses no cached prefix.
        reports_start: send a `TokenOutput` with `started` after the first step of a prompt that takes several steps.
    """

    id: int
    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams
    stop_ids: list[int] = []
    salt: Annotated[str, msgspec.Meta(max_length=64)] = ""
    turn: Annotated[int, msgspec.Meta(ge=0)] = 0
    prior_output: Annotated[int, msgspec.Meta(ge=0)] = msgspec.field(default=0, name="said")
    grammar: str = ""
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    reports_start: bool = False


class Embed(msgspec.Struct, frozen=True, kw_only=True, tag="embed"):
    """Server -> engine: compute the embedding of `prompt`, which the engine returns in one `TokenOutput`.

    Attributes:
        pooling: which hidden states after the last norm form the vector: the mean of all tokens, the last token or the
            first token (`cls`). The vector is not normalized.
        salt: the principal as one word, as in `Generate`.
    """

    id: int
    prompt: list[int]
    pooling: Pooling = "mean"
    salt: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Server -> engine, as the first message: the path of the model to load, and the options to run it with.

    Attributes:
        model: path of the model's file or folder.
        step_seconds: seconds without progress after which the server kills the engine; the engine sizes steps to take a
            fraction of this time.
    """

    model: str
    options: EngineOptions
    step_seconds: float


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Server -> engine: drop a sequence and free its pages; the engine ignores unknown ids."""

    id: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Server -> engine: finish the current step and exit."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Engine -> server, while loading: progress of one stage.

    Attributes:
        stage: `weights`, counted in bytes, or `graphs`, counted in captured graphs.
        done, total: finished and total amount of the stage, in the unit of `stage`.
        taken: bytes of GPU memory that the engine holds now.
    """

    stage: str
    done: int
    total: int
    taken: int = 0


class MemoryRequest(msgspec.Struct, frozen=True, kw_only=True, tag="needs"):
    """Engine -> server: the memory request of a model, in bytes. A `MemoryGrant` answers it.

    The engine sends the request after it has read headers and no weight. On a GPU it sends a second request after the
    weights are loaded and steps are measured.

    Attributes:
        free: free memory of the device.
        limit: maximum memory of all models of the node together, 0 for no limit.
        held: memory of the engine process at the time of the request. The server compares later readings with it.
        weights: weights in the format of the kernels.
        loading: peak memory of loading, minus `weights`.
        step: maximum memory of a step, without the part that depends on cached positions.
        page_step: memory of a step per KV page in use.
        position_step: memory of a step per position of one sequence.
        page: K and V of one page in all layers.
        page_size: positions per page.
        pages: requested number of KV pages.
        share: fraction of the memory after weights, steps and states that the KV cache may take.
        context: maximum positions of a sequence.
        state: recurrent state of one sequence.
        sequences, snapshots: requested numbers of state slots for sequences and snapshots. `sequences` applies to
            models without recurrent layers, too.
    """

    device: str
    free: int
    limit: int
    held: int
    weights: int
    loading: int
    step: int
    page_step: int
    position_step: int
    page: int
    page_size: int
    pages: int
    share: float
    context: int
    state: int
    sequences: int
    snapshots: int

    def pages_for(self, positions: int) -> int:
        """Return the number of pages that hold `positions` positions."""
        return -(-positions // self.page_size)


class MemoryGrant(msgspec.Struct, frozen=True, kw_only=True, tag="grant"):
    """Server -> engine: the granted part of a memory request.

    Attributes:
        total: bytes reserved for the engine.
        pages: number of KV pages.
        sequences: maximum number of running sequences.
        snapshots: number of snapshots of recurrent state.
    """

    total: int
    pages: int
    sequences: int
    snapshots: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Engine -> server: the model is loaded and the engine serves requests.

    Attributes:
        quant: format to which unquantized weights were quantized while loading; empty for no quantization.
        memory_bytes: bytes granted to the engine.
        max_sequences: maximum number of running sequences; 0 for the number in the options.
    """

    model_type: str
    device: str
    dtype: str
    kernels: str
    context_length: int
    vocab_size: int
    kv_pages: int
    page_size: int
    weight_bytes: int
    kv_bytes: int
    state_bytes: int = 0
    quant: str = ""
    memory_bytes: int = 0
    max_sequences: int = 0


class LoadFailed(msgspec.Struct, frozen=True, kw_only=True, tag="load_failed"):
    """Engine -> server: loading failed, with the error in one line."""

    kind: Literal["model_file", "out_of_memory", "device", "internal"]
    message: str


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds that a sequence spent waiting, in prefill and in decode.

    Attributes:
        read_tokens: tokens of the sequence's prompt that were computed in steps without decoding sequences.
        read_ms: the sequence's share of the time of these steps. Both values together give the prefill speed of this
            machine, independent of other requests.
    """

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    read_tokens: int = 0
    read_ms: float = 0.0


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of one step for one sequence. Only the last output has `finish`, `timing` and `error`.

    Attributes:
        logprobs: log-probabilities of `tokens`, if the request asks for them. They are the model's own, at temperature
            1 and before penalties, biases and grammars.
        prompt_logprobs: log-probabilities of the next prompt tokens, if the request asks for them. The first token of a
            prompt has none.
        cached_tokens: prompt tokens found in the KV cache; in the output with the first tokens or with `started`.
        started: True in the output after the first step of a prompt that takes several steps, if the request has
            `reports_start`.
        vector: the embedding of an `Embed` request; in the output with `finish`.
        retry: the request did not cause the error, and may succeed if it is repeated.
        bad_grammar: the request's grammar caused the error: it cannot be compiled, or exceeds a limit while it is
            matched.
    """

    id: int
    tokens: list[int] = []
    logprobs: list[Logprob] = []
    prompt_logprobs: list[Logprob] = []
    cached_tokens: int = 0
    started: bool = False
    vector: list[float] = []
    finish: FinishReason | None = None
    timing: Timing | None = None
    error: str | None = None
    retry: bool = False
    bad_grammar: bool = False


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an `Embed` request.

    Attributes:
        vector: float32 values in the model's hidden size; empty after an error.
        retry: the request did not cause the error, and may succeed if it is repeated.
    """

    id: int
    vector: list[float] = []
    error: str | None = None
    retry: bool = False


class StepReport(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """Engine -> server: new outputs and load figures, after each step and after messages to an idle engine.

    Attributes:
        running, waiting: number of sequences.
        free_pages: KV pages without a holder.
        prompt_tokens: number of prompt tokens of all sequences that the engine has started.
        cached_tokens: number of these tokens that were found in the KV cache.
    """

    outputs: list[TokenOutput]
    running: int
    waiting: int
    free_pages: int
    prompt_tokens: int = 0
    cached_tokens: int = 0


ToEngine = Load | MemoryGrant | Generate | Embed | Cancel | Shutdown
FromEngine = MemoryRequest | Progress | Ready | LoadFailed | StepReport
