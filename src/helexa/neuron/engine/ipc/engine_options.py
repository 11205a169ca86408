"""The options of an engine, which the server sends with the message `Load`."""

from typing import Literal

import msgspec

from helexa.neuron.ops.kernel_header import Kernels

Activations = Literal["auto", "int16", "int8"]
PrefixReuse = Literal["principal", "all", "off"]
TensorParallelMode = Literal["auto", "exact", "sum"]
StepTiming = Literal["measured", "fixed"]


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an engine: devices, formats, limits and caches of its model."""

    device: str = "cpu"  # `cpu`, `cuda:N` or `mps`
    # Device of each rank, if the ranks run on several devices; the first one is `device`. Empty if all ranks run on
    # `device`.
    devices: list[str] = []
    dtype: str = "auto"  # activation dtype, `auto`, `float32`, `bfloat16` or `float16`
    # `auto` for the fastest kernels that work, `torch` for plain torch only, `triton` for the GPU kernels. On a CPU,
    # the GPU kernels run slowly, in Triton's interpreter.
    kernels: Kernels = "auto"
    # format to which unquantized weights are quantized while they load: a name in `weights.quantization_formats`, or
    # empty for no quantization
    quant: str = ""
    # CPU threads of each rank. 0 for one per physical core: of the rank's CPUs if the rank is bound to CPUs (see
    # `ranks.cpu_binding`), else of the machine, whose cores the ranks share evenly.
    threads: int = 0
    # Token budget of one step, shared by all sequences. Decoding sequences get one token each even beyond the budget.
    max_step_tokens: int = 512
    # Maximum prompt tokens in a step that also has decoding sequences; 0 for no limit. The engine uses fewer if the
    # step would take much longer than decoding alone, because the decoding sequences wait for the end of the step.
    max_prefill_beside_decode: int = 128
    max_sequences: int = 64  # maximum number of sequences in one step
    max_waiting: int = 256  # maximum number of waiting sequences; further requests are rejected
    context_length: int = 0  # positions per sequence, 0 for the length that the model was trained on
    kv_cache_mb: int = 0  # size of the KV cache in MiB, 0 to size the cache from free memory
    # MiB of the device's memory that all models of the node may take together, 0 for all free memory
    memory_limit_mb: int = 0
    # MiB for snapshots of recurrent state; 0 for a part of free memory. A prompt with the same beginning as an earlier
    # prompt continues from a snapshot.
    snapshot_mb: int = 0
    # integer type to which the native CPU kernels round the input of products with quantized weights: `int16`, `int8`,
    # or `auto` for 8 bits, with 16 bits for outliers
    activations: Activations = "auto"
    # numbers in the KV cache: `int8`, which plain torch does not support; `unquantized` for the activation dtype, which
    # is bfloat16 on CPUs; or `auto` for 8 bits with the native CPU kernels and a context of more than 8,192 tokens,
    # otherwise unquantized
    kv_dtype: Literal["auto", "int8", "unquantized"] = "auto"
    # which prompts with a common beginning share KV pages: prompts of the same principal (`principal`), all prompts
    # (`all`), or none (`off`)
    prefix_reuse: PrefixReuse = "principal"
    # MiB of the disk for KV pages of earlier prompts, of all models together; 0 for none. The engine reads the pages
    # instead of computing the same prompts again, for example after a restart. Models on several hosts save no pages.
    prefix_disk_mb: int = 0
    model_id: str = ""  # name of the model for the user, which is saved with its prompts
    # Whether to use speculative decoding: draft tokens by repetition of parts of the prompt or output, and verify
    # several tokens in one step. The output does not change.
    speculation: bool = True
    speculation_max_sequences: int = 4  # number of decoding sequences above which the engine drafts no tokens
    # Path of a draft model's file or folder, or of the folder of an EAGLE-3 head; empty for none. A draft model is a
    # smaller model with the same vocabulary. It predicts tokens, which the engine verifies like the drafts of
    # `speculation`. Draft models require a CPU as the device, and one process that computes the whole model.
    draft_model: str = ""
    graphs: bool = True  # capture decode steps as graphs and replay them, if the kernels support it
    overlap: bool | None = None  # launch a step before the previous step is read; None to do so on GPUs only
    # Number of processes (ranks) that compute the model together. Each rank holds a part of the weights and of the KV
    # cache, and has its own `threads`.
    tensor_parallel: int = 1
    # How ranks divide matrices whose inputs they have computed themselves, such as the output projection of attention.
    # `exact` divides all matrices by rows, so that no sum is divided. With native kernels, tokens then equal those of
    # one rank. `sum` divides these matrices by columns and adds the partial results in the order of the ranks, which
    # needs fewer exchanges. `auto` is `exact` on CPUs and `sum` on GPUs.
    tensor_parallel_mode: TensorParallelMode = "auto"
    # Number of hosts that compute the model together. Each host computes a part of the layers with `tensor_parallel`
    # ranks.
    pipeline_parallel: int = 1
    images: bool = False  # whether to load the vision tower of the model, if the model has one
    # path of the GGUF file with the vision tower of a GGUF model; empty to look for it beside the model
    mmproj: str = ""
    max_image_tokens: int = 1024  # maximum number of tokens of an image, for which the engine requests memory
    image_cache_mb: int = 256  # MiB for the embeddings of images that were encoded recently
    # `measured` limits steps by the time that earlier steps took. `fixed` assumes nominal times, so that the same
    # requests in the same order get the same plans.
    step_timing: StepTiming = "measured"

    def device_of(self, rank: int) -> str:
        """Return the device of rank number `rank`."""
        return self.devices[rank] if self.devices else self.device


def no_draft_model(options: EngineOptions) -> str:
    """Return why `options` exclude a draft model; empty if they do not."""
    if options.tensor_parallel > 1 or options.pipeline_parallel > 1:
        return "several processes compute the model (tensor_parallel, pipeline_parallel)"
    if options.device != "cpu":
        return f"draft models run only on CPUs, not on {options.device}"
    if not options.speculation or not options.speculation_max_sequences:
        return "speculation is off (speculation, speculation_max_sequences)"
    return ""
