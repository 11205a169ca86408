"""The provider of one endpoint in a wire API. It remembers which parts of requests the endpoint rejects."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from helexa.acp.config import Endpoint
from helexa.acp.providers.connection import Connection
from helexa.acp.providers.model_list import model_cards
from helexa.acp.providers.provider import End, ModelCard, ModelEvent, ModelRequest, ProviderError
from helexa.acp.providers.rejection import refuses, refuses_tools
from helexa.acp.providers.wire import Json, Wire
from helexa.acp.providers.written_calls import MarkReader, written

_TOOLS = "tools"


class WireProvider:
    """A `Provider` built from a wire API and a connection.

    Compatible servers reject parts of an API. If an error names a part, the provider repeats the request without it and
    omits it in later requests to the same model. If a server rejects tools, the prompt asks the model for calls as
    text.
    """

    def __init__(self, endpoint: Endpoint, wire: Wire, connection: Connection) -> None:
        self.endpoint = endpoint
        self._wire = wire
        self._connection = connection
        self._refused: dict[tuple[str, str], frozenset[str]] = {}  # rejected keys by model and thought level

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Send a request and yield the answer; see `Provider`."""
        asked = (request.model, request.thought_level)
        while True:
            refused = self._refused.get(asked, frozenset())
            in_text = bool(request.tools) and (self.endpoint.tool_calls == "text" or _TOOLS in refused)
            body = self._wire.body(written(request) if in_text else request, self.endpoint.name, refused)
            begun = False
            try:
                async with aclosing(self._answer(request, body, in_text)) as events:
                    async for event in events:
                        begun = True
                        yield event
                return
            except ProviderError as error:
                refusal = None if begun else self._refusal(error, body)
                if refusal is None:
                    raise
                self._refused[asked] = refused | {refusal}

    async def models(self) -> list[ModelCard]:
        """Return the models of the endpoint; see `Provider`."""
        body = await self._connection.get(self._wire.models_path)
        try:
            return model_cards(body)
        except ValueError:
            raise ProviderError("invalid", f"{self.endpoint.name} does not list its models") from None

    async def close(self) -> None:
        """Close the connection; see `Provider`."""
        await self._connection.close()

    async def _answer(self, request: ModelRequest, body: Json, in_text: bool) -> AsyncGenerator[ModelEvent, None]:
        reader = self._wire.reader(request, self.endpoint.name)
        marks = MarkReader(request, asked_for=in_text) if in_text or self._wire.leaks_marks else None
        ended = False
        stream = self._connection.events(self._wire.path, body, self._wire.headers(request))
        async with aclosing(stream) as events:
            async for event in events:
                for said in reader.feed(event):
                    for what in marks.read(said) if marks else (said,):
                        yield what
        for said in reader.end():
            ended = ended or isinstance(said, End)
            for what in marks.read(said) if marks else (said,):
                yield what
        if not ended:
            raise ProviderError("interrupted", f"{self.endpoint.name} ended its answer before it was complete")

    def _refusal(self, error: ProviderError, body: Json) -> str | None:
        """Return the key that the endpoint rejected, if the request can omit it."""
        present = body.keys() | {key for value in body.values() if isinstance(value, dict) for key in value}
        if _TOOLS in present and self.endpoint.tool_calls == "auto" and refuses_tools(error):
            return _TOOLS
        return next((key for key in self._wire.optional if key in present and refuses(error, key)), None)
