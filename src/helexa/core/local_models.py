"""Records about the models on a node's disks, and about downloads to it.

Like the records in `helexa.core.fleet`, the classes ignore unknown fields.
"""

from typing import Literal

from pydantic import Field

from helexa.core.fleet import ModelId, Record, WireInt

MAX_LOCAL_MODELS = 1000  # maximum number of models that a node reports


class LocalModel(Record):
    """A model in a cache or a model folder of a node, whether it is loaded or not."""

    id: ModelId  # model id in requests, which is also the id of the loaded model
    source: str  # source id for load requests, such as `huggingface:org/name` or `file:/models/tiny.gguf`
    # other names of the same files: source ids, and the id with the quantization
    names: list[str] = Field(default_factory=list[str])
    form: str = ""  # quantization of a GGUF file, `safetensors`, or empty if unknown
    size_bytes: WireInt = 0  # size of the model's files
    # Estimated MiB that the model needs with a context of 2,048 tokens, from the file headers. None if unknown.
    memory_mb: WireInt | None = None
    context: WireInt | None = None  # trained context length in tokens, or None if unknown
    architecture: str | None = None  # name of the model's architecture, such as `qwen3`, or None if unknown
    parameters: WireInt | None = None  # number of parameters, or None if unknown
    # capabilities such as `text` and `vision`, as far as the files show; empty if unknown
    capabilities: list[str] = Field(default_factory=list[str])
    # True if the chat template offers tools, or can switch reasoning on
    tool_call: bool = False
    reasoning: bool = False
    # when the files were last changed, in seconds since 1970-01-01 UTC, or None if unknown
    modified: WireInt | None = None
    problem: str | None = None  # why the model cannot be loaded, or None if it can

    @property
    def usable(self) -> bool:
        """Whether the model can be loaded, as far as its files show."""
        return self.problem is None


class LocalModels(Record):
    """Response of `GET /models/local` of a node."""

    revision: str = ""  # text that changes when the list changes. `GET /health` has it, too.
    # the models, sorted by id, at most `MAX_LOCAL_MODELS`
    models: list[LocalModel] = Field(default_factory=list[LocalModel])
    complete: bool = True  # False if there are more models than the list has
    problems: list[str] = Field(default_factory=list[str])  # one line for each folder that cannot be read
    downloads: bool = False  # whether the node downloads models on request


class PullRequest(Record):
    """Body of `POST /models/pull` of a node: the model to download."""

    model: ModelId  # a source id, such as `org/name` or `org/name:Q4_K_M`
    quant: str | None = Field(default=None, max_length=100)  # quantization to download, if the source id names none


class Pull(Record):
    """The state of a download."""

    model: str  # the source id that the client named
    status: Literal["running", "done", "failed", "canceled"] = "running"  # state of the download
    stage: str | None = None  # current stage, such as `list`, `download` or `unpack`
    # bytes of the stage; `total` is None if unknown
    done: WireInt = 0
    total: WireInt | None = None
    error: str | None = None  # why the download failed
