"""Loads the draft model of a model (see `execution.draft_model`)."""

from pathlib import Path

import msgspec

from helexa.core.errors import ModelFileError
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.messages import EngineOptions, MemoryGrant, MemoryRequest, no_draft_model
from helexa.neuron.engine.loading.build import Build
from helexa.neuron.engine.scheduling.draft_gate import MOST_DRAFT_ROWS, DraftLimits
from helexa.neuron.models.decoder import Decoder

_MOST_MISSING = 128  # tokens that only one of the vocabularies has: models of a family differ in special tokens


class DraftPart(Build):
    """The open checkpoint of a draft model.

    Args:
        options: options of the model that verifies the drafts.
    """

    def __init__(self, options: EngineOptions) -> None:
        path = Path(options.draft_model)
        if reason := no_draft_model(options):
            raise ModelFileError(f"the draft model {path.name} cannot be used: {reason}; load without draft_model")
        drafting = min(options.max_sequences, max(options.speculation_max_sequences, 1))
        own = msgspec.structs.replace(
            options,
            quant="" if path.suffix.lower() == ".gguf" else options.quant,
            max_step_tokens=MOST_DRAFT_ROWS,
            max_sequences=drafting,
            context_length=0,
            kv_cache_mb=0,
            images=False,
            draft_model="",
        )
        super().__init__(path, own)
        self._fixed_cache = options.kv_cache_mb > 0
        if self.architecture.recurrent:
            self.checkpoint.close()
            raise ModelFileError(
                f"the draft model {path.name} cannot be used: it has recurrent layers; use a model of attention layers"
            )

    def added_to(self, request: MemoryRequest) -> MemoryRequest:
        """Return `request` with the memory of the draft model added."""
        own = self._own_request()
        page = request.page + own.page
        pages = request.pages
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
        # The caches of all layers have the page numbers of the model that verifies the drafts.
        return msgspec.structs.replace(own, page=own.page + own.window_page, window_page=0, window_pages=0)

    def start(self, decoder: Decoder, grant: MemoryGrant, step_bytes: int) -> tuple[Runner, DraftLimits]:
        """Allocate the KV cache of the draft model, and return its runner and limits.

        Args:
            decoder: the loaded draft model.
            grant: the memory grant of the model that verifies the drafts.
            step_bytes: bytes of weights that a step of this model reads.

        Raises:
            ModelFileError: the draft model computes logits that are not finite.
        """
        sequences = min(self.options.max_sequences, grant.sequences)
        own = msgspec.structs.replace(grant, sequences=sequences, snapshots=0)
        runner = Runner(decoder, self.ops, self.options, self._own_request(), own)
        if not runner.computes_finite_logits([0], None):
            raise ModelFileError(f"the draft model {self.path.name} computes logits that are not finite numbers")
        limits = DraftLimits(
            context=decoder.settings.context,
            vocab_size=decoder.vocab_size,
            ratio=min(self.ops.step_bytes / max(step_bytes, 1), 1.0),
        )
        return runner, limits


def require_same_vocabulary(model: Path, draft: Path) -> None:
    """Check that two models have the same vocabulary.

    Raises:
        ModelFileError: a token id has another text in the other model, or many tokens are missing in one of the models.
    """
    tokens, drafted = _token_bytes(model), _token_bytes(draft)
    for token, (text, other) in enumerate(zip(tokens, drafted, strict=False)):
        if text and other and text != other:
            raise ModelFileError(
                f"the draft model {draft.name} has another vocabulary than {model.name}: token {token} is "
                f"{other.decode(errors='replace')!r}, not {text.decode(errors='replace')!r}; use a smaller model of "
                "the same family"
            )
    longest = max(len(tokens), len(drafted))
    padded = (texts + [b""] * (longest - len(texts)) for texts in (tokens, drafted))
    missing = sum(bool(text) != bool(other) for text, other in zip(*padded, strict=True))
    if missing > _MOST_MISSING:
        raise ModelFileError(
            f"the draft model {draft.name} has another vocabulary than {model.name}: {missing} tokens are in only one "
            "of them; use a smaller model of the same family"
        )


def _token_bytes(model: Path) -> list[bytes]:
    from helexa.neuron.text.model_text import ModelText  # slow import that engines without a draft model do not need

    tokenizer = ModelText.open(model).tokenizer
    return [tokenizer.token_bytes(token, skip_special=False) for token in range(tokenizer.vocab_size)]
