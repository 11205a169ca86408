"""Messages between server and engine, sent over a Unix socket.

The messages contain only numbers, token ids and grammars. The struct types in this module are the whole protocol: an
engine accepts no other request.
"""

from typing import Annotated, Literal

import msgspec

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.host_channel import ChannelState, HostAddress
from helexa.neuron.text.settings_and_sampling_defaults import Pooling
from helexa.neuron.vision.image_tokens_and_errors import ImageLayout, ImageRange

MAX_TRACED_STEPS = 64  # Maximum number of steps that the engine reports for a traced request

FinishReason = Literal["stop", "length", "error"]
# The log-probability of a token, and pairs (token, log-probability) of the likeliest tokens at its position.
Logprob = tuple[float, list[tuple[int, float]]]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """In the message `Generate`: how the tokens of one sequence are chosen.

    The defaults are plain softmax sampling at temperature 1.
    """

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # sample from the likeliest tokens that together reach this probability; 1 is off
    top_k: int = 0  # number of likeliest tokens to sample from; 0 is off
    min_p: float = 0.0  # sample from tokens with at least this fraction of the largest probability; 0 is off
    repetition_penalty: float = 1.0  # penalty over prompt and output (Keskar et al., CTRL, 2019); 1 is off
    # penalties over the output, as OpenAI defines them
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    # Seed of the random draws. A draw depends only on the seed and the token's position, not on other sequences in the
    # batch. Logits may still differ in their last bits between batch sizes.
    seed: int = 0
    logit_bias: dict[int, float] = {}  # token id -> added logit
    # number of likeliest tokens to report with the log-probability of each output token; None reports no
    # log-probabilities
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None


class PromptImage(msgspec.Struct, frozen=True):
    """An image of a prompt.

    The server sends its pixels through the engine's socket for pixels (see `PixelReceiver`).
    """

    digest: bytes  # digest of the input of the vision tower (see `PreparedImage.digest`)
    layout: ImageLayout  # tiles and patches of the image, and number of its tokens


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """Server -> engine: generate at most `max_tokens` tokens after `prompt`.

    If `max_tokens` is 0, the engine only computes the prompt. The last output contains the end-of-sequence token, if
    one was sampled.
    """

    id: int
    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams
    stop_ids: list[int] = []  # tokens that end the sequence
    # Identifies the principal (API key owner) in one word; empty for anonymous clients. Principals get fair shares of
    # the engine. By default, only sequences of the same principal share pages of the KV cache.
    salt: Annotated[str, msgspec.Meta(max_length=64)] = ""
    # Number of prompt tokens before the last user message, which the client may change in a later request; 0 if
    # unknown. A model with recurrent layers saves a snapshot of its state at the end of these tokens.
    turn: Annotated[int, msgspec.Meta(ge=0)] = 0
    # Number of tokens at the end of the prompt that are output of an earlier request. Penalties count them as output.
    prior_output: Annotated[int, msgspec.Meta(ge=0)] = msgspec.field(default=0, name="said")
    # Grammar of the output as llguidance's JSON; empty for none. The sequence ends when the grammar is complete.
    grammar: str = ""
    # Number of likeliest tokens to report with the log-probability of each prompt token. None reports no
    # log-probabilities of the prompt. If a number is set, the engine computes the whole prompt and uses no cached
    # prefix.
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    # whether to send a `TokenOutput` with `started` after the first step of a prompt that takes several steps
    reports_start: bool = False
    # names the beginning of the prompt to a gateway (see `CachedPrefixes`), in hexadecimal digits; empty for none
    prefix_key: Annotated[str, msgspec.Meta(max_length=16)] = ""
    traced: bool = False  # whether the last `TokenOutput` reports the steps of the sequence
    images: list[PromptImage] = []
    # the image tokens of the prompt: the tokens whose embeddings are replaced with embeddings of the images, in the
    # order of the prompt
    image_ranges: list[ImageRange] = []


class Embed(msgspec.Struct, frozen=True, kw_only=True, tag="embed"):
    """Server -> engine: compute the embedding of `prompt` (in the reply's `vector`)."""

    id: int
    prompt: list[int]
    # How the hidden states after the last norm form the vector. The vector is not normalized.
    pooling: Pooling = "mean"
    salt: Annotated[str, msgspec.Meta(max_length=64)] = ""  # the principal as one word, as in `Generate`


class HostGroup(msgspec.Struct, frozen=True, kw_only=True):
    """In the message `Load`: how host 0 connects to the other hosts of a pipeline."""

    hosts: list[HostAddress]  # where the hosts accept connections, in the order of their stages
    own_address: str  # address of host 0, from which the engine connects
    secret: bytes  # the secret that all hosts of the group share
    version: str  # version of the code of host 0 (see `node_code_version`)

    def __repr__(self) -> str:
        return f"HostGroup({', '.join(map(str, self.hosts))})"  # without the secret


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Server -> engine, first message: load this model, and run it with `options`."""

    model: str  # path of the model's file or folder
    options: EngineOptions
    # Seconds without progress after which the server kills the engine. The engine limits the size of its steps so that
    # each takes a fraction of this time.
    step_seconds: float
    # the other hosts that compute parts of the model; None if this host computes the whole model
    group: HostGroup | None = None


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Server -> engine: drop the sequence `id`, if it exists, and free its pages."""

    id: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Server -> engine: finish the current step and exit.

    Attributes:
        save_secs: longest time for saving pages of the prefix cache to disk, in seconds.
    """

    save_secs: float = 2.0


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Engine -> server, while loading: progress of one stage of the load."""

    stage: str  # `weights` (reading the weights) or `graphs` (capturing graphs)
    # finished and total amount of work in this stage: bytes for `weights`, number of graphs for `graphs`
    done: int
    total: int
    taken: int = 0  # bytes of GPU memory that the engine holds now


class MemoryRequest(msgspec.Struct, frozen=True, kw_only=True, tag="needs"):
    """Engine -> server: the memory that a model needs. All sizes are in bytes.

    The engine sends the request after it has read the headers of the model's files, before it reads the weights. On a
    GPU, it sends a second request with measured sizes after the weights are loaded. The engine sends one request also
    if it has several ranks. On CPUs, the sizes are the sums over all ranks. On several devices, each device needs the
    requested memory.
    """

    device: str  # the device whose memory is requested
    free: int  # free memory of the device; with several devices, of the device with the least free memory
    limit: int  # maximum memory of all models of the node together; 0 for no limit
    # Memory that the engine process uses at the time of the request. The server subtracts it from later measurements to
    # find how much of the grant is allocated.
    held: int
    weights: int  # memory of the weights in the format of the kernels
    loading: int  # peak memory during loading, minus `weights`
    step: int  # maximum memory of a step, not counting `page_step` and `position_step`
    page_step: int  # additional memory of a step per KV page in use
    position_step: int  # additional memory of a step per position of one sequence
    page: int  # memory of K and V of one KV page in all layers, without `window_page`
    page_size: int  # positions per page
    pages: int  # requested number of KV pages
    # maximum fraction that the KV cache may take of the memory that remains after weights, steps and states
    share: float
    context: int  # maximum number of positions (tokens) of a sequence
    state: int  # memory of the recurrent state of one sequence; 0 for a model without recurrent layers
    sequences: int  # requested maximum number of running sequences, each of which takes one `state`
    snapshots: int  # requested number of snapshots of recurrent state, each of which takes one `state`
    kv_bits: int = 16  # bits of each number in the KV cache
    devices: list[str] = []  # the devices of the ranks if the ranks run on several devices; else empty
    # number of rows by which a step may exceed the token budget, because an image must be computed in one step
    image_rows: int = 0
    # For models that have layers with and without a sliding window: memory of one KV page in the layers with a window,
    # and the number of window pages that suffices for any number of KV pages.
    window_page: int = 0
    window_pages: int = 0

    def pages_for(self, positions: int) -> int:
        """Return how many KV pages are needed for `positions` positions."""
        return -(-positions // self.page_size)

    def window_pages_of(self, pages: int) -> int:
        """Return the number of window pages of a KV cache with `pages` pages.

        Return 0 if the layers with a sliding window have the same pages as the other layers.
        """
        return self.window_pages if self.window_pages < pages else 0

    def cache_bytes(self, pages: int) -> int:
        """Return the bytes of a KV cache with `pages` pages."""
        return pages * self.page + (self.window_pages_of(pages) or pages) * self.window_page


class MemoryGrant(msgspec.Struct, frozen=True, kw_only=True, tag="grant"):
    """Server -> engine: the memory that the engine may use (reply to `MemoryRequest`)."""

    total: int  # bytes reserved for the engine
    pages: int  # number of KV pages
    sequences: int  # maximum number of running sequences
    snapshots: int  # number of snapshots of recurrent state


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Engine -> server: the model is loaded and the engine serves requests."""

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
    quant: str = ""  # format to which unquantized weights were quantized while loading; empty for no quantization
    memory_bytes: int = 0  # bytes granted to the engine
    max_sequences: int = 0  # maximum number of running sequences; 0 if the number in `EngineOptions` applies
    images: bool = False  # whether the engine has loaded the vision tower of the model


class LoadFailed(msgspec.Struct, frozen=True, kw_only=True, tag="load_failed"):
    """Engine -> server: the model could not be loaded; `message` is one line."""

    kind: Literal["model_file", "does_not_fit", "out_of_memory", "device", "internal"]
    message: str


class TracedStep(msgspec.Struct, frozen=True, kw_only=True):
    """In the message `StepReport`: one engine step of a traced request."""

    begun_ms: float  # milliseconds from the sequence's arrival in the engine to the start of the step
    ms: float  # duration of the step in milliseconds
    tokens: int  # number of tokens of this sequence that the step computed
    batch: int  # number of sequences in the step


class Timing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """In the message `StepReport`: milliseconds waiting, in prefill and in decode."""

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    # number of prompt tokens of the sequence that were computed in prefill-only steps (steps without decoding
    # sequences)
    read_tokens: int = 0
    # Duration of the prefill-only steps, divided among the sequences of each step by their tokens. `read_tokens /
    # read_ms` is the prefill speed without the influence of decoding sequences.
    read_ms: float = 0.0
    steps: list[TracedStep] = []  # the first `MAX_TRACED_STEPS` steps of a traced sequence; empty for other sequences


class PrefixMiss(msgspec.Struct, frozen=True, kw_only=True):
    """In the message `StepReport`: why a long start of a prompt was computed again.

    The prompt is compared with the most similar earlier prompt of the same principal.
    """

    position: int  # index of the first token that had to be computed again
    # `changed`: the token at `position` differs from the earlier prompt. `evicted`: the KV pages from `position` were
    # neither in memory nor read from disk. `no_state`: the pages were in memory, but not the recurrent state.
    reason: Literal["changed", "evicted", "no_state"]


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """In the message `StepReport`: the result of one step for one sequence.

    Only the last output has `finish`, `timing` and `error`.
    """

    id: int
    tokens: list[int] = []
    # Log-probabilities of `tokens`, if the request sets `SamplingParams.logprobs`. They are computed at temperature 1,
    # without penalties, biases and grammars.
    logprobs: list[Logprob] = []
    # Log-probabilities of prompt tokens, if the request sets `Generate.prompt_logprobs`. Each output contains the
    # prompt tokens after those of the previous output. The first prompt token has no log-probability.
    prompt_logprobs: list[Logprob] = []
    # Number of prompt tokens found in the KV cache. The number is set only in the output with the first tokens or with
    # `started`, and 0 in other outputs.
    cached_tokens: int = 0
    miss: PrefixMiss | None = None  # why `cached_tokens` is not larger; set in the output that sets `cached_tokens`
    # True in the output after the first step of a prompt that takes several steps, if the request sets `reports_start`
    started: bool = False
    vector: list[float] = []  # the embedding, in the last output of an `Embed` request
    finish: FinishReason | None = None
    timing: Timing | None = None
    error: str | None = None
    # whether the request may succeed if the client sends it again, because the request did not cause the error
    retry: bool = False
    # whether the request's grammar caused the error: the grammar cannot be compiled, or the matcher exceeded a limit
    bad_grammar: bool = False


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `EngineClient.embed`: the embedding of a prompt, or an error."""

    id: int
    vector: list[float] = []  # float32 values in the model's hidden size; empty after an error
    error: str | None = None
    # whether the request may succeed if the client sends it again, because the request did not cause the error
    retry: bool = False


class Drafts(msgspec.Struct, frozen=True, array_like=True):
    """In the message `StepReport`: numbers of drafts of all sequences so far."""

    ngram: int = 0  # number of drafts by n-gram lookup that were verified
    accepted_ngram: int = 0  # number of these drafts that were accepted
    model: int = 0  # number of drafts of the draft model that were verified
    accepted_model: int = 0  # number of these drafts that were accepted
    # Speed of recent decode steps divided by their estimated speed without the draft model; 0 without a draft model.
    gain: float = 0.0


class ClearPrefixes(msgspec.Struct, frozen=True, kw_only=True, tag="clear_prefixes"):
    """Server -> engine: forget all cached prefixes, in memory and on disk."""


class CachedPrefixes(msgspec.Struct, frozen=True, array_like=True):
    """In the message `StepReport`: keys of cached prompts (`prefix_key`), latest last."""

    memory: list[str] = []  # prompts of which at least the first half is in the KV cache
    disk: list[str] = []  # other prompts of which at least the first half is on disk


class DiskUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """In `StepReport`: reads of saved prompts, and the total size of saved prompts."""

    tokens: int = 0  # number of tokens whose KV pages were read
    prompts: int = 0  # number of prompts for which pages were read
    read_bytes: int = 0
    read_ms: int = 0
    size: int = 0  # bytes of the records that this engine can use; 0 until the first long prompt


class StepReport(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """Engine -> server: outputs of a step. Also sent after messages that need no step."""

    outputs: list[TokenOutput]
    # number of running and of waiting sequences
    running: int
    waiting: int
    free_pages: int  # number of KV pages that no sequence holds
    prompt_tokens: int = 0  # number of prompt tokens of all sequences that the engine has started
    cached_tokens: int = 0  # number of these prompt tokens that were found in the KV cache
    cached_prompts: int = 0  # number of started prompts whose beginning was found in the KV cache
    disk: DiskUse = DiskUse()
    prefixes: CachedPrefixes | None = None  # keys of cached prompts; None if they are unchanged since the last report
    cleared: int = 0  # number of `ClearPrefixes` messages that the engine has handled
    encoded_images: int = 0  # number of images that the vision tower has encoded
    reused_images: int = 0  # number of images whose embeddings were found in the cache of the encoder
    drafts: Drafts = Drafts()


class CollectiveResult(msgspec.Struct, frozen=True):
    """Rank check -> server: the result of one exchange between ranks."""

    operation: str  # `gather` or `sum`
    transport: str  # how the ranks exchange data: `shared memory` or `gloo`
    size: int  # size of the result in bytes
    verified: bool  # whether the result has the expected values
    median_us: float | None  # median duration in microseconds; None if the exchange was not timed


class StageSetup(msgspec.Struct, frozen=True, kw_only=True, tag="stage_setup"):
    """Member of a host group -> its stage process, first message: channel and device."""

    channel: ChannelState
    # device of this host, and CPU threads of each rank (0: one per physical core)
    device: str
    threads: int


class MemoryDenied(msgspec.Struct, frozen=True, tag="memory_denied"):
    """Member of a host group -> its stage process: why the stage does not fit."""

    message: str


ToEngine = Load | MemoryGrant | Generate | Embed | Cancel | ClearPrefixes | Shutdown
FromEngine = MemoryRequest | Progress | Ready | LoadFailed | StepReport
