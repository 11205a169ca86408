"""Qwen2 and Qwen2.5 (dense): Llama with biases on queries, keys and values.

Reference: transformers `modeling_qwen2`.
"""

from typing import ClassVar

from helexa.neuron.models.llama import Llama


class Qwen2(Llama):
    """Llama with attention biases, and an optional sliding window in the layers from `max_window_layers` on.

    The attention biases need no code here, because the `Loader` reads a bias if the checkpoint has one.
    """

    defaults: ClassVar = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
    types = ("full_attention", "sliding_attention")

    def prepare(self) -> None:
        """Check the sliding window settings, in addition to the work of `Llama.prepare`.

        Raises:
            ModelFileError: `layer_types` lists sliding attention, but `use_sliding_window` is not true.
        """
        super().prepare()
        if "sliding_attention" in self.layer_types:
            self.settings.require(use_sliding_window=(True,))

    def layer_type(self, index: int) -> str:
        """Return the type of layer `index`.

        The layers from `max_window_layers` on have a sliding window if `use_sliding_window` is true and
        `sliding_window` is not null. All other layers have full attention.
        """
        config = self.settings.config
        windowed = config.get("use_sliding_window") and config["sliding_window"] is not None
        return "sliding_attention" if windowed and index >= config["max_window_layers"] else "full_attention"
