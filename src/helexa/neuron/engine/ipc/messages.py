"""The messages between the server process and an engine process; `frames` carries them over a Unix socket.

Only numbers, token ids and grammars are in them. The struct types are the whole protocol: an engine can be asked for
nothing else.
"""

from typing import Annotated, Literal

import msgspec

from helexa.neuron.ops.constants import Kernels
from helexa.neuron.text.pooling import Pooling

DEBUG_FAULT = "NEURON_DEBUG_FAULT"
"""The environment variable that asks engines to fail on purpose; see `debug_fault`."""

PLAN_LOG = "NEURON_DEBUG_PLAN_LOG"
"""The environment variable that names a folder for plan logs; see `recorded_scheduler`."""

FinishReason = Literal["stop", "length", "error"]
Activations = Literal["auto", "int16", "int8"]
PrefixReuse = Literal["principal", "all", "off"]
StepTiming = Literal["measured", "fixed"]
Logprob = tuple[float, list[tuple[int, float]]]
"""The log-probability of a token, and the likeliest tokens in its place with theirs."""


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine runs its model.

    Attributes:
        device: `cpu`, `cuda:N` or `mps`.
        dtype: activation dtype, `auto`, `float32`, `bfloat16` or `float16`.
        kernels: `auto` for the fastest that work, `torch` for plain torch alone, `triton` for those of GPUs, which run
            on a CPU in Triton's interpreter, slowly.
        quant: what plain weights become while they load, one of the names in `weights.quant_form`; empty leaves them.
        threads: CPU threads, 0 for one per physical core.
        max_step_tokens: token budget of one step, shared by all sequences; never less than one for each.
        max_prefill_beside_decode: most prompt tokens in a step in which others decode and wait for its end; fewer when
            the step would take much longer than theirs alone. 0 for no bound.
        max_sequences: sequences that may run in one step.
        max_waiting: sequences that may wait; one more is refused.
        context_length: positions per sequence, 0 for what the model was trained on.
        kv_cache_mb: bytes of the KV cache in MiB, 0 to size it from free memory.
        memory_limit_mb: MiB of the device's memory that all models of the node may take together, 0 for all that is
            free.
        snapshot_mb: MiB for snapshots of the state of recurrent layers, from which prompts that begin alike go on;
            0 for a part of free memory.
        activations: to what the native CPU kernels round the input of products with quantised weights: `int16`,
            `int8`, or `auto` for what suits the model.
        kv_dtype: of the KV cache, `auto` for the activations' own or `int8`, which plain torch does not know.
        speculation: guess tokens that repeat what is in prompt or output, and compute several at a time; the answer
            is the same.
        speculation_max_sequences: while more than these decode, nothing is guessed.
        graphs: record steps of decoding once and run them again whole, where the kernels can.
        overlap: launch a step before the one before it is read; None where that pays, on GPUs.
        prefix_reuse: whose prompts share pages of the KV cache when they begin alike: those with the same salt, `all`,
            or nobody's.
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
    """How one sequence's tokens are chosen. The defaults change nothing: plain softmax sampling at temperature 1.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 is off.
        repetition_penalty: over prompt and output (Keskar et al., CTRL, 2019); 1 is off.
        frequency_penalty, presence_penalty: over the output, as OpenAI defines them.
        seed: with a position, it determines every draw, whatever else is in the batch; logits may still differ in their
            last bits between batch sizes.
        logit_bias: token id -> added logit.
        logprobs: how many alternatives to tell of with the log-probability of each token; None tells neither.
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

    The end-of-sequence token that ends a sequence is reported in its last `TokenOutput` like any other.

    Attributes:
        salt: who it is for, as one word, empty for anonymous callers. Principals take turns, and pages of the KV cache
            are shared between sequences of the same one only.
        turn: leading tokens of the prompt that stay when its last turn is said anew; a model with recurrent layers
            keeps its state there. 0 if that is not known.
        said: tokens at the prompt's end that are output already, of a request before this one.
        grammar: of the output, as llguidance's JSON; empty for none. When it is complete, the sequence ends.
        prompt_logprobs: number of alternatives to report with the log-probability of each prompt token; None reports
            neither. The KV cache is not searched for the prompt then.
        reports_start: a prompt that takes several steps has a `TokenOutput` with `started` after the first of them.
    """

    id: int
    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams
    stop_ids: list[int] = []
    salt: Annotated[str, msgspec.Meta(max_length=64)] = ""
    turn: Annotated[int, msgspec.Meta(ge=0)] = 0
    said: Annotated[int, msgspec.Meta(ge=0)] = 0
    grammar: str = ""
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    reports_start: bool = False


class Embed(msgspec.Struct, frozen=True, kw_only=True, tag="embed"):
    """Server -> engine: the vector of `prompt`, which comes as one `TokenOutput`.

    Attributes:
        pooling: of which hidden states behind the last norm it is made: the mean of all tokens', the last one's, or the
            first one's. Its length is what the model makes it.
        salt: see `Generate`.
    """

    id: int
    prompt: list[int]
    pooling: Pooling = "mean"
    salt: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Server -> engine, before anything else: what to load, and how to run it.

    Attributes:
        step_seconds: time without progress after which the server kills the engine; steps are sized to take a fraction
            of it.
    """

    model: str
    options: EngineOptions
    step_seconds: float


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Server -> engine: drop a sequence and free its pages; unknown ids are ignored."""

    id: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Server -> engine: finish the current step and exit."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Engine -> server, while loading: `done` of `total` of `stage`, bytes of `weights` or recorded `graphs`.

    Attributes:
        taken: bytes of an accelerator's memory that the engine holds by now.
    """

    stage: str
    done: int
    total: int
    taken: int = 0


class Needs(msgspec.Struct, frozen=True, kw_only=True, tag="needs"):
    """Engine -> server: what the model takes, in bytes. A `Grant` answers.

    It comes when headers are read and no weight is; on an accelerator once more, when the weights are there and steps
    have been measured.

    Attributes:
        free: of the device's memory now.
        limit: that all models of the node may take together, 0 for no such limit.
        held: memory of this process now, to tell later how much of what was granted it has taken.
        weights: as kernels hold them.
        loading: most that loading takes beside them.
        step: most that a step takes, apart from what depends on the positions that it looks at.
        page_step, position_step: that a step takes for each page in use, and for each position of one sequence.
        page: of the KV cache, of `page_size` positions.
        pages: wanted.
        share: of what weights and states leave; the cache may take so much.
        context: positions that a sequence may have.
        state: of the recurrent layers of one sequence.
        sequences, snapshots: wanted.
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
        """Pages that hold so many positions."""
        return -(-positions // self.page_size)


class Grant(msgspec.Struct, frozen=True, kw_only=True, tag="grant"):
    """Server -> engine: what of its needs is met. `total` bytes are promised to it."""

    total: int
    pages: int
    sequences: int
    snapshots: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Engine -> server: the model is loaded and serves.

    Attributes:
        quant: what plain weights became while they loaded, empty if they stayed as they were.
        memory_bytes: that were granted to it.
        max_sequences: that it has room for, where that is fewer than it was asked to run; else 0.
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
    """Engine -> server: loading ended in an error, said in one line."""

    kind: Literal["model_file", "out_of_memory", "device", "internal"]
    message: str


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds a sequence spent waiting, in prefill and in decode.

    Attributes:
        read_tokens, read_ms: how much was read of its prompt in steps that had nothing but prompts, and its share of
            the time that they took: they tell how fast this machine reads, whoever else is served.
    """

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    read_tokens: int = 0
    read_ms: float = 0.0


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step brought one sequence. `finish`, `timing` and `error` come with the last one only.

    Attributes:
        logprobs: of each of the tokens, if the request asks for them: those of the model itself, at temperature 1 and
            before anything else that has a say in the choice.
        prompt_logprobs: of the next prompt tokens, if the request asks for them. The first token of a prompt has none.
        cached_tokens: prompt tokens that need not be computed; comes with the first tokens, or with `started`.
        started: the first part of the prompt is computed; see `Generate.reports_start`.
        vector: of a prompt that was to be embedded; comes with `finish`.
        retry: the error is none of the request's doing; the same may succeed in a moment.
        bad_grammar: the request causes the error: its grammar cannot be compiled, or exceeds a limit on the way.
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
    """What became of an `Embed`: its vector, float32 in the model's width, or an error, which `retry` may escape."""

    id: int
    vector: list[float] = []
    error: str | None = None
    retry: bool = False


class StepReport(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """Engine -> server, once per step (and after a cancel while idle): all new tokens, and how full the engine is.

    Attributes:
        prompt_tokens, cached_tokens: of all sequences that were ever started; the second were found in the KV cache.
    """

    outputs: list[TokenOutput]
    running: int
    waiting: int
    free_pages: int
    prompt_tokens: int = 0
    cached_tokens: int = 0


ToEngine = Load | Grant | Generate | Embed | Cancel | Shutdown
FromEngine = Needs | Progress | Ready | LoadFailed | StepReport
