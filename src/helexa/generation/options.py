"""Options of generation, for the library's functions and the class `Model`."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from helexa.core.sampling import Sampling, SamplingOptions
from helexa.generation.request import Image
from helexa.generation.run_requests import Result
from helexa.generation.tools import Tool

if TYPE_CHECKING:
    from pydantic import BaseModel

OnResult = Callable[[int, Result], Awaitable[None] | None]
"""Called for each result of a batch with the index of the prompt and the completion or error."""


class AskOptions(SamplingOptions, total=False):
    """Options of generation: the fields of `Sampling`, and the following fields.

    Attributes:
        sampling: all sampling options in one object. A sampling option that is passed as a keyword argument
            overrides the option in this object.
        system: the system prompt.
        schema: JSON Schema or pydantic model that constrains the response; see `Completion.parsed`.
        think: whether the model reasons before its response. None selects the model's default.
        images: images that precede the text of each prompt. The model must have the capability `vision`.
        tools: tools that the model may call: Python functions, or tools in the format of OpenAI's chat API; see
            `Completion.tool_calls`. The library does not run the functions.
        tool_choice: `auto`, `none`, `required` (the model must call a tool), or the name of the tool to call.
        logprobs: True to report the log-probability of each token, or the number of most likely tokens to report for
            each token as well; see `Completion.logprobs`.
    """

    sampling: Sampling | None
    system: str | None
    schema: "Mapping[str, Any] | type[BaseModel] | None"
    think: bool | None
    images: Sequence[Image] | None
    tools: Sequence[Tool] | None
    tool_choice: str | Mapping[str, Any] | None
    logprobs: bool | int | None


class BatchOptions(AskOptions, total=False):
    """Options of a batch.

    Attributes:
        max_parallel: number of concurrent requests. Default: `HELEXA_NUM_PARALLEL`, else the default of the server or
            the engine.
        on_result: plain or async function, called with the index and the result of each prompt that this call runs, as
            soon as the prompt ends. If the function raises an exception, the batch ends and the exception is raised.
    """

    max_parallel: int | None
    on_result: OnResult | None
