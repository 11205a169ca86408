"""Encodes images of prompts, and collects the embeddings that a step needs."""

from collections import OrderedDict

import numpy as np

from helexa.neuron import tensors
from helexa.neuron.engine.scheduling.plan import PlanEntry
from helexa.neuron.engine.scheduling.prompt_images import ImageTraits
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.step_input_and_graph_sizes import Float32, Int32, int32
from helexa.neuron.models.vision.tower import ImageFeatures, VisionTower


class ImageEncoder:
    """The vision tower of a model, with an LRU cache of image embeddings.

    Attributes:
        encoded: number of images that the tower has encoded.
        reused: number of images whose embeddings were found in the cache.
    """

    def __init__(self, tower: VisionTower, max_bytes: int) -> None:
        self.encoded = self.reused = 0
        self._tower = tower
        # Maximum size of the cache. The cache always keeps the image that was encoded last.
        self._max_bytes = max_bytes
        self._cache: OrderedDict[bytes, ImageFeatures] = OrderedDict()
        self._cached_bytes = 0

    @property
    def traits(self) -> ImageTraits:
        """How the model treats image tokens."""
        return ImageTraits(self._tower.merge, self._tower.whole)

    @property
    def patch_values(self) -> int:
        """Number of values of a patch in the input of the tower."""
        return self._tower.patch_values

    def features(self, sequence: Sequence, image: int) -> ImageFeatures:
        """Return the embeddings of image number `image` of a sequence."""
        # If the previous chunk of the prompt ended inside this image, the sequence has kept the embeddings. The cache
        # may have evicted them since then.
        if sequence.encoded is not None and sequence.encoded[0] == image:
            return sequence.encoded[1]
        entry = sequence.request.images[image]
        features = self._cache.pop(entry.digest, None)
        if features is None:
            with tensors.inference_mode():
                # The cache needs a copy, because graphs that later steps replay overwrite the result of the tower.
                features = self._tower.encode(tensors.from_numpy(sequence.pixels[image]), entry.layout).clone()
            self.encoded += 1
            self._cached_bytes += _size(features)
        else:
            self.reused += 1
        self._cache[entry.digest] = features
        while self._cached_bytes > self._max_bytes and len(self._cache) > 1:
            self._cached_bytes -= _size(self._cache.popitem(last=False)[1])
        return features


class ImageRows:
    """The rows of a step that belong to images.

    `bool()` of the object is False if the step has no image tokens and all of its positions are those of text.
    """

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._embeddings: list[Float32] = []
        self._deepstack: list[Float32] = []
        self._positions: list[tuple[int, Int32]] = []
        self._ends: list[tuple[int, Int32]] = []

    def __bool__(self) -> bool:
        return bool(self._rows or self._positions)

    def add(self, entry: PlanEntry, start: int, encoder: ImageEncoder) -> None:
        """Add the image rows of one sequence to the step; encode images not in the cache.

        Args:
            start: index of the sequence's first row in the step.
        """
        sequence, first = entry.sequence, entry.sequence.computed
        images, stop = sequence.images, first + entry.count + len(entry.drafts)
        assert images is not None
        if (positions := images.positions(first, stop)) is not None:
            self._positions.append((start, positions))
        if (ends := images.attention_ends(first, stop)) is not None:
            self._ends.append((start, ends))
        encoded = None
        for image_range in images.overlapping(first, stop):
            features = encoder.features(sequence, image_range.image)
            begin, end = max(image_range.start, first), min(image_range.end, stop)
            place = image_range.first + begin - image_range.start
            part = slice(place, place + end - begin)
            self._rows += range(start + begin - first, start + end - first)
            self._embeddings.append(features.embeddings[part].cpu().numpy())
            if features.deepstack:
                self._deepstack.append(tensors.stack([layer[part] for layer in features.deepstack]).cpu().numpy())
            # The next chunk may begin in this image, so its embeddings stay with the sequence.
            if end == stop:
                encoded = (image_range.image, features)
        sequence.encoded = encoded

    @property
    def rows(self) -> Int32 | None:
        """Indexes of the E image tokens among all rows of the step, int32 [E].

        None if the step has no image tokens.
        """
        return int32(self._rows) if self._rows else None

    @property
    def embeddings(self) -> Float32 | None:
        """Embeddings of the E image tokens, float32 [E, H]; None without image tokens."""
        return np.concatenate(self._embeddings) if self._rows else None

    @property
    def deepstack(self) -> Float32 | None:
        """Values to add to the hidden states of the E image tokens, float32 [D, E, H].

        The values at index d of the first dimension are added after layer d of the model. None if the vision tower has
        no such values, or if the step has no image tokens.
        """
        return np.concatenate(self._deepstack, axis=1) if self._deepstack else None

    def positions(self, positions: Int32) -> Int32:
        """Return the positions of all rows, [rows], or [3, rows] for M-RoPE (three axes).

        The argument `positions`, [rows], is correct for text, and for rows after the last image of a sequence.
        """
        if not self._positions:
            return positions
        axes = np.tile(positions, (3, 1))
        for start, part in self._positions:
            axes[:, start : start + part.shape[1]] = part
        return axes

    def attention_ends(self, positions: Int32) -> Int32 | None:
        """Return how many tokens of its sequence each row attends to, int32 [rows].

        Return None if each row attends only to itself and to the tokens before it. `positions` is the index of each row
        in its sequence.
        """
        if not self._ends:
            return None
        ends = positions + 1
        for start, part in self._ends:
            ends[start : start + len(part)] = part
        return ends


def _size(features: ImageFeatures) -> int:
    return sum(tensor.nbytes for tensor in (features.embeddings, *features.deepstack))
