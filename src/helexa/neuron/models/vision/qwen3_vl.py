"""The vision tower of Qwen3-VL (reference: transformers `modeling_qwen3_vl`)."""

from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.models.vision.qwen3_5 import Qwen35Tower


class Qwen3VlTower(Qwen35Tower):
    """The tower of Qwen3.5 with deepstack: the text model receives the hidden states of several layers."""

    def prepare(self) -> None:
        """Read the mergers of the deepstack layers, after the work of `Qwen35Tower.prepare`."""
        super().prepare()
        layers = self.settings.config.get("deepstack_visual_indexes") or []
        if not isinstance(layers, list) or not set(layers) <= set(range(self.settings.layers)):
            raise ModelFileError(f"config: 'deepstack_visual_indexes' is {layers!r}, expected indexes of layers")
        self._deepstack = {
            index: self.merger(f"deepstack_merger_list.{place}", norm_after=True) for place, index in enumerate(layers)
        }

    @property
    def deepstack_layers(self) -> tuple[int, ...]:
        """Indexes of the layers whose hidden states the text model receives, too."""
        return tuple(self._deepstack)

    def deepstack(self, index: int, hidden: Tensor) -> Tensor:
        """Return the projection, [T, width], of the hidden states after layer `index`."""
        return self._deepstack[index](hidden)
