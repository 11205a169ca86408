"""The messages between the server process and an engine process; `frames` sends them over a Unix socket.

The messages contain only numbers, token ids and grammars. The struct types in this module are the whole protocol: an
engine accepts no other request.
"""

from typing import Annotated, Literal

import msgspec

from helexa.neuron.engine.ipc.channel import HostAddress
from helexa.neuron.ops.constants import Kernels
from helexa.neuron.text.pooling import Pooling
from helexa.neuron.vision.preprocessing.layout import ImageLayout
from helexa.neuron.vision.prompt.image_range import ImageRange

MAX_TRACED_STEPS = 64
"""Maximum number of steps that the engine reports for a traced request."""

DEBUG_FAULT = "NEURON_DEBUG_FAULT"
"""The environment variable that injects faults into engines; see `debug_fault`."""

PLAN_LOG = "NEURON_DEBUG_PLAN_LOG"
"""The environment variable that names a folder for plan logs; see `recorded_scheduler`."""

FinishReason = Literal["stop", "length", "error"]
Activations = Literal["auto", "int16", "int8"]
PrefixReuse = Literal["principal", "all", "off"]
TensorParallelMode = Literal["auto", "exact", "sum"]
StepTiming = Literal["measured", "fixed"]
Logprob = tuple[float, list[tuple[int, float]]]
"""The log-probability of a token, and pairs (token, log-probability) of the likeliest tokens at its position."""


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine runs its model.

    Attributes:
        device: `cpu`, `cuda:N` or `mps`.
        devices: device of each rank, if the ranks run on several devices; the first one is `device`. Empty if all ranks
            run on `device`.
        dtype: activation dtype, `auto`, `float32`, `bfloat16` or `float16`.
        kernels: `auto` for the fastest kernels that work, `torch` for plain torch only, `triton` for the GPU kernels.
            On a CPU, the GPU kernels run in Triton's interpreter, slowly.
        quant: format to which unquantized weights are quantized while they load, one of the names in
            `weights.quant_form`; empty for no quantization.
        threads: CPU threads of each rank. 0 for one per physical core: of the rank's CPUs if the rank is bound to CPUs
            (see `ranks.cpu_binding`), else of the machine, whose cores the ranks share evenly.
        max_step_tokens: token budget of one step, shared by all sequences. Decoding sequences get one token each even
            beyond the budget.
        max_prefill_beside_decode: maximum prompt tokens in a step that also has decoding sequences; 0 for no limit. The
            engine uses fewer if the step would take much longer than decoding alone, because decoding waits for it.
        max_sequences: maximum number of sequences in one step.
        max_waiting: maximum number of waiting sequences; further requests are rejected.
        context_length: positions per sequence, 0 for the length that the model was trained on.
        kv_cache_mb: size of the KV cache in MiB, 0 to size the cache from free memory.
        memory_limit_mb: MiB of the device's memory that all models of the node may take together, 0 for all free
            memory.
        snapshot_mb: MiB for snapshots of recurrent state; 0 for a part of free memory. A prompt with the same beginning
            as an earlier prompt continues from a snapshot.
        activations: integer type to which the native CPU kernels round the input of products with quantized weights:
            `int16`, `int8`, or `auto` for 8 bits, with 16 bits for outliers.
        kv_dtype: dtype of the KV cache: `auto` for the activation dtype, or `int8`, which plain torch does not support.
        speculation: whether to use speculative decoding: draft tokens by repetition of parts of the prompt or output,
            and verify several tokens in one step. The output does not change.
        speculation_max_sequences: number of decoding sequences above which the engine drafts no tokens.
        graphs: capture decode steps as graphs and replay them, if the kernels support it.
        overlap: launch a step before the previous step is read; None to do so on GPUs only.
        prefix_reuse: which prompts with a common beginning share KV pages: prompts of the same principal
            (`principal`), all prompts (`all`), or none (`off`).
        tensor_parallel: number of processes (ranks) that compute the model together. Each rank holds a part of the
            weights and of the KV cache, and has its own `threads`.
        tensor_parallel_mode: how ranks divide matrices whose inputs they have computed themselves, such as the output
            projection of attention. `exact` divides all matrices by rows, so that no sum is divided. With native
            kernels, the tokens are then those of one rank. `sum` divides these matrices by columns and adds the partial
            results in the order of the ranks, which needs fewer exchanges. `auto` is `exact` on CPUs and `sum` on GPUs.
        pipeline_parallel: number of hosts that compute the model together. Each host computes a part of the layers with
            `tensor_parallel` ranks.
        images: whether to load the vision tower of the model, if the model has one.
        mmproj: path of the GGUF file with the vision tower of a GGUF model; empty to look for it beside the model.
        max_image_tokens: maximum number of tokens of an image, for which the engine requests memory.
        image_cache_mb: MiB for the embeddings of images that were encoded recently.
        step_timing: `measured` limits steps by the time that earlier steps took. `fixed` assumes nominal times, so that
            the same requests in the same order get the same plans.
    """

    device: str = "cpu"
    devices: list[str] = []
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
    tensor_parallel: int = 1
    tensor_parallel_mode: TensorParallelMode = "auto"
    pipeline_parallel: int = 1
    images: bool = False
    mmproj: str = ""
    max_image_tokens: int = 1024
    image_cache_mb: int = 256
    step_timing: StepTiming = "measured"

    def device_of(self, rank: int) -> str:
        """Return the device of rank number `rank`."""
        return self.devices[rank] if self.devices else self.device


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one sequence are chosen. The defaults are plain softmax sampling at temperature 1.

    Attributes:
        temperature: 0 is greedy.
        top_p: sample from the likeliest tokens that together reach this probability; 1 is off.
        min_p: sample from tokens with at least this fraction of the largest probability; 0 is off.
        top_k: number of likeliest tokens to sample from; 0 is off.
        repetition_penalty: penalty over prompt and output (Keskar et al., CTRL, 2019); 1 is off.
        frequency_penalty, presence_penalty: penalties over the output, as OpenAI defines them.
        seed: seed of the random draws. A draw depends only on the seed and the token's position, not on other sequences
            in the batch. Logits may still differ in their last bits between batch sizes.
        logit_bias: token id -> added logit.
        logprobs: number of likeliest tokens to report with the log-probability of each output token; None reports no
            log-probabilities.
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


class PromptImage(msgspec.Struct, frozen=True):
    """An image of a prompt. The server sends its pixels through the engine's socket for pixels (see `pixel_socket`).

    Attributes:
        digest: digest of the input of the vision tower (see `PreparedImage.digest`).
        layout: tiles and patches of the image, and number of its tokens.
    """

    digest: bytes
    layout: ImageLayout


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """Server -> engine: generate at most `max_tokens` tokens after `prompt`. If it is 0, only compute the prompt.

    If an end-of-sequence token ends the sequence, the last `TokenOutput` contains this token.

    Attributes:
        stop_ids: tokens that end the sequence.
        salt: identifies the principal (API key owner) in one word; empty for anonymous clients. Principals get fair
            shares of the engine. By default, only sequences of the same principal share pages of the KV cache.
        turn: number of prompt tokens before the last user message, which the client may change in a later request; 0 if
            unknown. A model with recurrent layers saves a snapshot of its state at the end of these tokens.
        prior_output: number of tokens at the end of the prompt that are output of an earlier request. Penalties count
            them as output.
        grammar: grammar of the output as llguidance's JSON; empty for none. The sequence ends when the grammar is
            complete.
        prompt_logprobs: number of likeliest tokens to report with the log-probability of each prompt token. None
            reports no log-probabilities of the prompt. If a number is set, the engine computes the whole prompt and
            uses no cached prefix.
        reports_start: whether to send a `TokenOutput` with `started` after the first step of a prompt that takes
            several steps.
        traced: whether the last `TokenOutput` reports the steps of the sequence.
        images: the images of the prompt.
        image_ranges: the image tokens of the prompt: the tokens whose embeddings are replaced with embeddings of the
            images, in the order of the prompt.
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
    traced: bool = False
    images: list[PromptImage] = []
    image_ranges: list[ImageRange] = []


class Embed(msgspec.Struct, frozen=True, kw_only=True, tag="embed"):
    """Server -> engine: compute the embedding of `prompt`. The engine returns the embedding in one `TokenOutput`.

    Attributes:
        pooling: which hidden states after the last norm form the vector: the mean of all tokens, the last token or the
            first token (`cls`). The vector is not normalized.
        salt: the principal as one word, as in `Generate`.
    """

    id: int
    prompt: list[int]
    pooling: Pooling = "mean"
    salt: Annotated[str, msgspec.Meta(max_length=64)] = ""


class HostGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The other hosts that compute a model together with host 0 (pipeline parallelism).

    Attributes:
        hosts: where the hosts accept connections, in the order of their stages.
        own_address: address of host 0, from which the engine connects.
        secret: the secret that all hosts of the group share.
        version: version of the code of host 0 (see `code_version`).
    """

    hosts: list[HostAddress]
    own_address: str
    secret: bytes
    version: str

    def __repr__(self) -> str:
        return f"HostGroup({', '.join(map(str, self.hosts))})"  # without the secret


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Server -> engine, as the first message: load this model, and run it with these options.

    Attributes:
        model: path of the model's file or folder.
        step_seconds: seconds without progress after which the server kills the engine. The engine limits the size of
            its steps so that each takes a fraction of this time.
        group: the other hosts that compute parts of the model; None if this host computes the whole model.
    """

    model: str
    options: EngineOptions
    step_seconds: float
    group: HostGroup | None = None


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Server -> engine: drop the sequence `id` and free its pages. The engine ignores unknown ids."""

    id: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Server -> engine: finish the current step and exit."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Engine -> server, while loading: progress of one stage of the load.

    Attributes:
        stage: `weights` (reading the weights) or `graphs` (capturing graphs).
        done, total: finished and total amount of work in this stage: bytes for `weights`, number of graphs for
            `graphs`.
        taken: bytes of GPU memory that the engine holds now.
    """

    stage: str
    done: int
    total: int
    taken: int = 0


class MemoryRequest(msgspec.Struct, frozen=True, kw_only=True, tag="needs"):
    """Engine -> server: the memory that a model needs. All sizes are in bytes. The server replies with a `MemoryGrant`.

    The request of several ranks on CPUs is for all ranks together. The request of ranks on several devices is for each
    of the devices.

    The engine sends the request after it has read the headers of the model's files, before it reads the weights. On a
    GPU, the engine sends a second request with measured sizes after the weights are loaded.

    Attributes:
        device: the device whose memory is requested.
        devices: the devices of all ranks, if there are several, each of which takes the requested memory.
        free: free memory of the device. Of several devices, the least.
        limit: maximum memory of all models of the node together; 0 for no limit.
        held: memory that the engine process uses at the time of the request. The server subtracts it from later
            measurements to find how much of the grant is allocated.
        weights: memory of the weights in the format of the kernels.
        loading: peak memory during loading, minus `weights`.
        step: maximum memory of a step, not counting `page_step` and `position_step`.
        page_step: additional memory of a step per KV page in use.
        position_step: additional memory of a step per position of one sequence.
        page: memory of K and V of one KV page in all layers.
        page_size: positions per page.
        pages: requested number of KV pages.
        share: maximum fraction that the KV cache may take of the memory that remains after weights, steps and states.
        context: maximum number of positions (tokens) of a sequence.
        state: memory of the recurrent state of one sequence; 0 for a model without recurrent layers.
        sequences: requested maximum number of running sequences, each of which takes one `state`.
        snapshots: requested number of snapshots of recurrent state, each of which takes one `state`.
        image_rows: number of rows by which a step may exceed the token budget, because an image must be computed in one
            step.
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
    devices: list[str] = []
    image_rows: int = 0

    def pages_for(self, positions: int) -> int:
        """Return how many KV pages are needed for `positions` positions."""
        return -(-positions // self.page_size)


class MemoryGrant(msgspec.Struct, frozen=True, kw_only=True, tag="grant"):
    """Server -> engine: the memory that the engine may use. This is the reply to a `MemoryRequest`.

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
        max_sequences: maximum number of running sequences; 0 if the number in `EngineOptions` applies.
        images: whether the engine has loaded the vision tower of the model.
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
    images: bool = False


class LoadFailed(msgspec.Struct, frozen=True, kw_only=True, tag="load_failed"):
    """Engine -> server: the model could not be loaded. `message` says why, in one line."""

    kind: Literal["model_file", "does_not_fit", "out_of_memory", "device", "internal"]
    message: str


class TracedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One engine step of a traced request.

    Attributes:
        begun_ms: milliseconds from the sequence's arrival in the engine to the start of the step.
        ms: duration of the step in milliseconds.
        tokens: number of tokens of this sequence that the step computed.
        batch: number of sequences in the step.
    """

    begun_ms: float
    ms: float
    tokens: int
    batch: int


class Timing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Milliseconds that a sequence spent in the waiting queue, in prefill and in decode.

    Attributes:
        read_tokens: number of prompt tokens of the sequence that were computed in prefill-only steps (steps without
            decoding sequences).
        read_ms: duration of the prefill-only steps, divided among the sequences of each step by their tokens.
            `read_tokens / read_ms` is the prefill speed without the influence of decoding sequences.
        steps: the first `MAX_TRACED_STEPS` steps of a traced sequence; empty for other sequences.
    """

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    read_tokens: int = 0
    read_ms: float = 0.0
    steps: list[TracedStep] = []


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of one step for one sequence. Only the last output has `finish`, `timing` and `error`.

    Attributes:
        logprobs: log-probabilities of `tokens`, if the request sets `SamplingParams.logprobs`. They are computed at
            temperature 1, without penalties, biases and grammars.
        prompt_logprobs: log-probabilities of prompt tokens, if the request sets `Generate.prompt_logprobs`. Each output
            contains the prompt tokens after those of the previous output. The first prompt token has no
            log-probability.
        cached_tokens: number of prompt tokens found in the KV cache. The number is set only in the output with the
            first tokens or with `started`, and 0 in other outputs.
        started: True in the output after the first step of a prompt that takes several steps, if the request sets
            `reports_start`.
        vector: the embedding, in the last output of an `Embed` request.
        retry: whether the request may succeed if the client sends it again, because the request did not cause the
            error.
        bad_grammar: whether the request's grammar caused the error: the grammar cannot be compiled, or the matcher
            exceeded a limit.
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
        retry: whether the request may succeed if the client sends it again, because the request did not cause the
            error.
    """

    id: int
    vector: list[float] = []
    error: str | None = None
    retry: bool = False


class StepReport(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """Engine -> server: new outputs and current counts. Sent after each step and after messages to an idle engine.

    Attributes:
        running, waiting: number of running and of waiting sequences.
        free_pages: number of KV pages that no sequence holds.
        prompt_tokens: number of prompt tokens of all sequences that the engine has started.
        cached_tokens: number of these prompt tokens that were found in the KV cache.
        encoded_images: number of images that the vision tower has encoded.
        reused_images: number of images whose embeddings were found in the cache of the encoder.
    """

    outputs: list[TokenOutput]
    running: int
    waiting: int
    free_pages: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    encoded_images: int = 0
    reused_images: int = 0


ToEngine = Load | MemoryGrant | Generate | Embed | Cancel | Shutdown
FromEngine = MemoryRequest | Progress | Ready | LoadFailed | StepReport
