"""A model to load, and options of the load. No pydantic, which is slow to import."""

from dataclasses import dataclass
from typing import Annotated, Any

from helexa.core.sampling import Bounds, RecommendedSampling

MAX_MODEL_ID = 1000
"""Maximum number of characters in a model id, which may be a path."""


class _PrintableId:
    """The constraint of `ModelId`, which only pydantic checks."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core.core_schema import no_info_after_validator_function, str_schema

        return no_info_after_validator_function(_printable, str_schema(min_length=1, max_length=MAX_MODEL_ID))


def _printable(model_id: str) -> str:
    if not model_id.isprintable():
        raise ValueError("a model id cannot contain control characters; remove the control characters")
    return model_id


ModelId = Annotated[str, _PrintableId()]
"""A model id. Ids are shown in logs and on web pages, so line breaks and other control characters are rejected."""


@dataclass(kw_only=True)
class LoadOptions:
    """A model to load, and options of the load (see `core.node_reports.ModelSpec`)."""

    model_id: ModelId
    harness: str = "torch"
    source: str | None = None
    quant: str | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    devices: list[int] | None = None
    tool_parser: str | None = None
    sampling: RecommendedSampling | None = None
    # Path on the node of the GGUF file with the vision tower of a GGUF model. None to look for the file beside the
    # model.
    mmproj: str | None = None
    # Source id of a draft model: a smaller model with the same vocabulary, or an EAGLE-3 head. The predictions of the
    # draft model make the output faster, and do not change it.
    draft_model: str | None = None
    # Maximum number of tokens of an image. Larger images are shrunk.
    max_image_tokens: Annotated[int | None, Bounds(16, 1 << 16)] = None
    # False to use only the model's files on the disk, without a request to a hub. If some of the files are missing, the
    # load fails.
    download: bool | None = None
    # Seconds without requests after which the model falls asleep; 0 for never, None for the node's setting.
    idle_unload_secs: Annotated[float | None, Bounds(0)] = None
