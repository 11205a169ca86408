"""Loads the draft model or the draft head of a model.

See `execution.draft_model` and `execution.draft_head`. The option `draft_model` names a draft model, or the folder of
an EAGLE-3 head.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from helexa.core.errors import ModelFileError, UnsupportedModelError
from helexa.core.logs import quoted
from helexa.neuron.engine.execution.draft_head import CONTEXT, TAIL
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.engine_options import EngineOptions, no_draft_model
from helexa.neuron.engine.ipc.messages import MemoryGrant, MemoryRequest
from helexa.neuron.engine.loading.build import Build
from helexa.neuron.engine.scheduling.draft_length import MOST_DRAFT_ROWS, DraftLimits
from helexa.neuron.layers.loader import Loader
from helexa.neuron.models.decoder import Decoder, KeptStates
from helexa.neuron.models.draft_heads import MTP_HEADS, DraftHead, EagleHead, gives_layer_inputs
from helexa.neuron.ops.kernel_header import MAX_DRAFTS, PAGE_SIZE
from helexa.neuron.ops.native.native_ops import NativeOps
from helexa.neuron.weights.checkpoint import Checkpoint
from helexa.neuron.weights.model_file import read_json
from helexa.neuron.weights.safetensors_checkpoint import SafetensorsCheckpoint, eagle_tensor_names, head_tensor_names

_log = logging.getLogger("helexa.neuron.engine")
# Maximum number of tokens that only the draft model or only the model has. Models of a family may differ in special
# tokens.
_MOST_MISSING = 128


class DraftPart(Build):
    """The open checkpoint of a draft model.

    Args:
        options: options of the model that verifies the drafts.
    """

    def __init__(self, options: EngineOptions) -> None:
        path = Path(options.draft_model)
        if reason := no_draft_model(options):
            raise ModelFileError(
                f"the draft model {path.name} cannot be used: {reason}", advice="load without draft_model"
            )
        super().__init__(path, _own_options(options, path))
        self._fixed_cache = options.kv_cache_mb > 0
        if self.architecture.recurrent:
            self.checkpoint.close()
            raise ModelFileError(
                f"the draft model {path.name} cannot be used: draft models with recurrent layers are not supported",
                advice="use a draft model whose layers all have attention",
            )

    def added_to(self, request: MemoryRequest) -> MemoryRequest:
        """Return `request` with the draft model added; a fixed KV cache gets fewer pages."""
        own = self._own_request()
        page = request.page + own.page
        pages = request.pages
        # A KV cache whose size is set by an option must also hold the pages of the draft model.
        if self._fixed_cache:
            pages = max(request.cache_bytes(pages) // (page + request.window_page), 1)
        return msgspec.structs.replace(
            request,
            weights=request.weights + own.weights,
            loading=max(request.loading, own.loading),
            step=request.step + own.step,
            page_step=max(request.page_step, own.page_step),
            position_step=max(request.position_step, own.position_step),
            page=page,
            pages=pages,
        )

    def _own_request(self) -> MemoryRequest:
        own = self.request()
        # No window pages, because all layers of the draft model use the KV page numbers of the verifying model.
        return msgspec.structs.replace(own, page=own.page + own.window_page, window_page=0, window_pages=0)

    def load(self, decoder: Decoder, on_progress: Callable[[int, int], None]) -> Decoder:
        """Load and return the draft model.

        Args:
            decoder: the model that verifies the drafts.
            on_progress: called with (bytes read, total bytes) while the weights load.
        """
        return self.model(on_progress)

    def start(self, decoder: Decoder, grant: MemoryGrant, step_bytes: int) -> tuple[Runner, DraftLimits]:
        """Allocate the KV cache of the draft model, and return its runner and limits.

        Args:
            decoder: the loaded draft model.
            grant: the memory grant of the model that verifies the drafts.
            step_bytes: bytes of weights that a step of the model that verifies the drafts reads.

        Raises:
            ModelFileError: the draft model computes logits that are not finite.
        """
        sequences = min(self.options.max_sequences, grant.sequences)
        own = msgspec.structs.replace(grant, sequences=sequences, snapshots=0)
        runner = Runner(decoder, self.ops, self.options, self._own_request(), own)
        if not runner.computes_finite_logits([0], None):
            raise ModelFileError(
                f"the draft model {self.path.name} computes logits that are not finite numbers",
                advice="load without draft_model",
            )
        limits = DraftLimits(
            context=decoder.settings.context,
            vocab_size=decoder.vocab_size,
            ratio=min(self.ops.step_bytes / max(step_bytes, 1), 1.0),
        )
        return runner, limits


class HeadPart(Build):
    """An open draft head, from the model's checkpoint (MTP) or a folder (EAGLE-3).

    Args:
        build: the model that verifies the drafts.
    """

    def __init__(self, build: Build, path: Path) -> None:
        self._model: Decoder | None = None
        self._contexts = _drafting(build.options)
        self._rows = max(build.options.max_step_tokens, build.options.max_sequences) * (1 + MAX_DRAFTS)
        super().__init__(path, _own_options(build.final_options, path))
        try:
            self.check(build)
            self._inputs = self.architecture_of(self.model_type).input_layers(self.config, build.layers)
            self._own_request = self.request()
        except BaseException:
            self.checkpoint.close()
            raise

    def architecture_of(self, model_type: str) -> type[DraftHead]:
        """Return the class that implements the draft head."""
        raise NotImplementedError

    def check(self, build: Build) -> None:
        """Raise a ModelFileError if the head does not fit `build`; overridden by EAGLE-3."""

    def part(self) -> str:
        """Return the name of the head's part of the checkpoint."""
        return "draft head"

    def build(self, config: dict[str, Any], loader: Loader) -> Decoder:
        """Return the head, which shares the token embedding of the model."""
        return self.architecture_of(self.model_type)(config, loader, self._model)

    def added_to(self, request: MemoryRequest) -> MemoryRequest:
        """Return `request` with the memory of the draft head added."""
        own = self._own_request
        # number of hidden states in memory: the kept states, and the inputs of the head
        states = (MAX_DRAFTS + 1) * self._contexts + TAIL + 4 * self._step_rows
        kept = states * max(len(self._inputs), 1) * int(self.config["hidden_size"]) * 4
        cache = self._pages * (own.page + own.window_page)
        return msgspec.structs.replace(
            request,
            weights=request.weights + own.weights,
            loading=max(request.loading, own.loading),
            step=request.step + own.step + cache + kept,
        )

    @property
    def _pages(self) -> int:
        return self._contexts * CONTEXT // PAGE_SIZE

    @property
    def _step_rows(self) -> int:
        return MOST_DRAFT_ROWS + MAX_DRAFTS * self._contexts

    def load(self, decoder: Decoder, on_progress: Callable[[int, int], None]) -> Decoder:
        """Load and return the draft head; `decoder` keeps hidden states for the head."""
        self._model = decoder
        decoder.kept = KeptStates(decoder.loader.ops, self._rows, decoder.settings.hidden, self._inputs)
        return self.model(on_progress)

    def start(self, decoder: Decoder, grant: MemoryGrant, step_bytes: int) -> tuple[Runner, DraftLimits]:
        """Allocate the head's KV cache; return runner and limits (see `DraftPart.start`)."""
        assert isinstance(decoder, DraftHead)
        rows = self._step_rows
        decoder.allocate(rows)
        decoder.kept = KeptStates(self.ops, rows, decoder.settings.hidden)
        own = msgspec.structs.replace(grant, pages=self._pages, sequences=self._contexts, snapshots=0)
        runner = Runner(decoder, self.ops, self.options, self._own_request, own)
        ratio = min(self.ops.step_bytes / max(step_bytes, 1), 1.0)
        return runner, DraftLimits(1 << 30, decoder.vocab_size, ratio, is_head=True)


class MtpPart(HeadPart):
    """The open draft head in the checkpoint of a model."""

    def open(self, path: Path) -> Checkpoint:
        """Open the tensors of the head."""
        checkpoint = SafetensorsCheckpoint(path, head_tensor_names)
        # The configuration describes the layers of the model, but the head is a single layer with full attention.
        checkpoint.config |= {"num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_only_layers": []}
        return checkpoint

    def architecture_of(self, model_type: str) -> type[DraftHead]:
        """Return the class that implements the draft head."""
        return MTP_HEADS[model_type]


class EaglePart(HeadPart):
    """The open folder of an EAGLE-3 head."""

    def __init__(self, build: Build, path: Path) -> None:
        reason = no_draft_model(build.options)
        if not reason and build.ops.name != NativeOps.name:
            reason = f"draft heads need the native kernels, not the kernels {build.ops.name}"
        if not reason and not gives_layer_inputs(build.architecture):
            reason = f"draft heads for models of the architecture '{build.model_type}' are not implemented"
        if reason:
            raise ModelFileError(
                f"the draft head {path.name} cannot be used: {reason}", advice="load without draft_model"
            )
        try:
            super().__init__(build, path)
        except ModelFileError as error:
            raise ModelFileError(
                f"the draft head {path.name} cannot be used: {error.problem}",
                advice=f"use a head that was trained for {build.path.name}, or load without draft_model",
            ) from None

    def open(self, path: Path) -> Checkpoint:
        """Open the tensors of the head.

        Raises:
            ModelFileError: the folder has no valid checkpoint.
            UnsupportedModelError: the head has the format of the library speculators.
        """
        if "speculators_model_type" in read_json(path / "config.json"):
            raise UnsupportedModelError(
                "heads in the format of the library 'speculators' are not supported; convert the head to the EAGLE-3 "
                "format"
            )
        return SafetensorsCheckpoint(path, eagle_tensor_names)

    def architecture_of(self, model_type: str) -> type[DraftHead]:
        """Return the class that implements the draft head.

        Raises:
            UnsupportedModelError: the layer of the head is not a layer of Llama.
        """
        if model_type != "llama":
            raise UnsupportedModelError(f"config: 'model_type' of the draft head is {model_type!r}, supported: 'llama'")
        return EagleHead

    def check(self, build: Build) -> None:
        """Raise a ModelFileError, or a subclass, if the head does not fit `build`."""
        if self.ops.name != NativeOps.name:
            raise UnsupportedModelError(
                "the native kernels do not support the sizes of the draft head, and draft heads cannot run with the "
                f"kernels {self.ops.name}"
            )
        hidden = build.config.get("hidden_size")
        vocabulary = build.checkpoint.shape(f"{build.architecture.names.embedding}.weight")[0]
        wanted = {"hidden_size": hidden, "target_hidden_size": hidden, "vocab_size": vocabulary}
        for key, value in wanted.items():
            if self.config.get(key, value) != value:
                text = f"config: '{key}' is {str(self.config[key])[:40]} in the draft head, but {value} in the model"
                raise ModelFileError(f"{text}; use a head that was trained for this model")


def _is_eagle_head(path: Path) -> bool:
    """Return whether `path` is the folder of an EAGLE-3 head, by its configuration."""
    if not (path / "config.json").is_file():
        return False
    config = read_json(path / "config.json")
    names = config.get("architectures")
    named = isinstance(names, list) and any("eagle3" in str(name).lower() for name in names)
    return named or "draft_vocab_size" in config or "eagle_config" in config


def open_draft(build: Build) -> DraftPart | HeadPart | None:
    """Open the draft model that the options name, else the model's own draft head.

    Return None if there is neither, or if the options, the kernels or an error exclude the model's own head. The caller
    must close the result with a `with` statement.

    Raises:
        ModelFileError: the draft model cannot be used.
    """
    options, checkpoint = build.options, build.checkpoint
    if options.draft_model and _is_eagle_head(Path(options.draft_model)):
        return EaglePart(build, Path(options.draft_model))
    if options.draft_model:
        part = DraftPart(options)
        try:
            _require_same_vocabulary(build.path, part.path)
        except BaseException:
            part.checkpoint.close()
            raise
        return part
    has_head = isinstance(checkpoint, SafetensorsCheckpoint) and checkpoint.has_head and build.model_type in MTP_HEADS
    if not has_head or no_draft_model(options) or build.ops.name != NativeOps.name:
        return None
    try:
        return MtpPart(build, build.path)
    except ModelFileError as error:  # the model works without its head
        fields = (quoted(build.path), quoted(error))
        _log.warning("draft head (MTP) not used path=%s error=%s; the model is loaded without the head", *fields)
        return None


def _drafting(options: EngineOptions) -> int:
    return min(options.max_sequences, max(options.speculation_max_sequences, 1))


def _own_options(options: EngineOptions, path: Path) -> EngineOptions:
    """Return the options of a draft model or a draft head at `path`."""
    return msgspec.structs.replace(
        options,
        quant="" if path.suffix.lower() == ".gguf" else options.quant,
        max_step_tokens=MOST_DRAFT_ROWS,
        max_sequences=_drafting(options),
        context_length=0,
        kv_cache_mb=0,
        images=False,
        draft_model="",
    )


def _require_same_vocabulary(model: Path, draft: Path) -> None:
    """Check that two models have the same vocabulary.

    Raises:
        ModelFileError: a token id has different texts in the two models, or only one of the models has many tokens.
    """
    tokens, drafted = _token_bytes(model), _token_bytes(draft)
    for token, (text, other) in enumerate(zip(tokens, drafted, strict=False)):
        if text and other and text != other:
            raise ModelFileError(
                f"the draft model {draft.name} has another vocabulary than {model.name}: token {token} is "
                f"{other.decode(errors='replace')!r}, not {text.decode(errors='replace')!r}",
                advice="use a smaller model of the same family",
            )
    longest = max(len(tokens), len(drafted))
    padded = (texts + [b""] * (longest - len(texts)) for texts in (tokens, drafted))
    missing = sum(bool(text) != bool(other) for text, other in zip(*padded, strict=True))
    if missing > _MOST_MISSING:
        raise ModelFileError(
            f"the draft model {draft.name} has another vocabulary than {model.name}: {missing} tokens are in only "
            "one vocabulary",
            advice="use a smaller model of the same family",
        )


def _token_bytes(model: Path) -> list[bytes]:
    from helexa.neuron.text.model_text import ModelText  # slow import that engines without a draft model do not need

    tokenizer = ModelText.open(model).tokenizer
    return [tokenizer.token_bytes(token, skip_special=False) for token in range(tokenizer.vocab_size)]
