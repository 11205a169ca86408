"""Loads the vision tower of a model, and estimates its memory."""

from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Self

from helexa.core.errors import ModelFileError
from helexa.neuron.engine.execution.image_encoder import ImageEncoder
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.loading.memory_estimate import WeightSizes, require_all_read
from helexa.neuron.layers.loader import Loader
from helexa.neuron.layers.stage import WHOLE_MODEL
from helexa.neuron.models.decoder import Decoder
from helexa.neuron.models.vision import tower_class
from helexa.neuron.ops.interface import Ops
from helexa.neuron.weights.quantization_formats import VisionQuantPolicy
from helexa.neuron.weights.vision_checkpoint import VisionCheckpoint, open_vision_checkpoint

_LARGE_SIDE = 1 << 13  # side of an image in pixels; an image of this size is always shrunk
_WHOLE_IMAGES = 2  # images by which a step may exceed the token budget, if images must be computed in one step


class VisionMemory(NamedTuple):
    """Memory of a vision tower in bytes."""

    weights: int  # weights in the format of the kernels
    step: int  # memory to encode the largest image, and the cache of embeddings
    image_rows: int  # see `MemoryRequest.image_rows`


class VisionPart:
    """The vision part of a model's files, which is open for loading.

    Args:
        ops: the kernels of the text model.
        quant: quantization of the text model (see `VisionQuantPolicy`).
    """

    def __init__(self, checkpoint: VisionCheckpoint, ops: Ops, quant: str, options: EngineOptions) -> None:
        self._checkpoint = checkpoint
        self._ops = ops
        self._options = options
        self._policy = VisionQuantPolicy(quant)
        self._architecture = tower_class(checkpoint.config["model_type"])

    @classmethod
    def open(cls, path: Path, ops: Ops, quant: str, options: EngineOptions) -> Self | None:
        """Open the vision part of a model; return None if the model has none.

        Raises:
            ModelFileError: the files are invalid, or the architecture is not supported.
        """
        checkpoint = open_vision_checkpoint(path, Path(options.mmproj) if options.mmproj else None)
        if checkpoint is None:
            return None
        with ExitStack() as on_error:
            on_error.callback(checkpoint.close)
            if not checkpoint.names():
                return None
            part = cls(checkpoint, ops, quant, options)
            on_error.pop_all()
        return part

    @property
    def total_bytes(self) -> int:
        """Total size of the tensors in the files, in bytes."""
        return self._checkpoint.total_bytes

    def close(self) -> None:
        """Close the files."""
        self._checkpoint.close()

    def memory(self) -> VisionMemory:
        """Return the memory of the vision tower, without reading its weights."""
        # This module imports Pillow, which engines of text models do not need.
        from helexa.neuron.vision.processor_choice import image_layout, image_processor

        sizes = WeightSizes(self._checkpoint, self._ops, self._policy, WHOLE_MODEL)
        tower = self._architecture(self._checkpoint.config, sizes)
        kind = self._checkpoint.config["model_type"]
        require_all_read(self._checkpoint, sizes.read, WHOLE_MODEL, tower.settings.layers, f"vision tower of {kind}")
        processor = image_processor(self._checkpoint.config, self._checkpoint.preprocessor)
        # An image of this size is shrunk to the largest layout that a prompt may have.
        layout = image_layout(processor, _LARGE_SIDE, _LARGE_SIDE, self._options.max_image_tokens)
        values = 3 * sizes.widest + 6 * tower.settings.hidden + 2 * tower.patch_values
        embeddings = layout.tokens * tower.width * (1 + len(tower.deepstack_layers))
        step = 4 * (layout.patches * values + embeddings) + (self._options.image_cache_mb << 20)
        return VisionMemory(sizes.allocated, step, _WHOLE_IMAGES * layout.tokens if tower.whole else 0)

    def load(self, model: Decoder) -> ImageEncoder:
        """Load the vision tower, and return the image encoder for prompts of `model`.

        Raises:
            ModelFileError: the vision tower does not fit the text model.
        """
        loader = Loader(self._checkpoint, self._ops, lambda done: None, policy=self._policy)
        tower = self._architecture(self._checkpoint.config, loader)
        settings = model.settings
        if tower.width != settings.hidden:
            raise ModelFileError(
                f"the vision tower computes embeddings of {tower.width} numbers, but the text model has "
                f"{settings.hidden}",
                advice="use the mmproj file of this model, or download the model again",
            )
        if len(tower.deepstack_layers) >= settings.layers:
            raise ModelFileError(
                f"the vision tower has {len(tower.deepstack_layers)} deepstack layers, but the text model has only "
                f"{settings.layers} layers",
                advice="use the mmproj file of this model, or download the model again",
            )
        return ImageEncoder(tower, self._options.image_cache_mb << 20)
