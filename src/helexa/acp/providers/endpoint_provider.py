"""The client of one endpoint, which remembers the request keys that the endpoint rejects."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from helexa.acp.config import Endpoint
from helexa.acp.providers.api_format import ApiFormat, Json
from helexa.acp.providers.connection import Connection
from helexa.acp.providers.model_list import model_cards
from helexa.acp.providers.provider import End, ModelCard, ModelEvent, ModelRequest, ProviderError
from helexa.acp.providers.rejection import rejects, rejects_tools
from helexa.acp.providers.written_calls import MarkerReader, with_written_calls

_TOOLS = "tools"


class EndpointProvider:
    """The client of one endpoint (a `Provider`), built from an API format and a connection.

    Some compatible servers reject optional keys of the request body. If an error names such a key, the client repeats
    the request without the key, and omits the key in later requests to the same model. If a server rejects tools, the
    system prompt asks the model to write tool calls as text.
    """

    def __init__(self, endpoint: Endpoint, api_format: ApiFormat, connection: Connection) -> None:
        self.endpoint = endpoint
        self._api_format = api_format
        self._connection = connection
        self._rejected_keys: dict[tuple[str, str], frozenset[str]] = {}  # rejected keys by model and thought level

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Send a request and yield the events of the streamed response; see `Provider`."""
        key = (request.model, request.thought_level)
        while True:
            rejected = self._rejected_keys.get(key, frozenset())
            calls_in_text = bool(request.tools) and (self.endpoint.tool_calls == "text" or _TOOLS in rejected)
            body = self._api_format.body(
                with_written_calls(request) if calls_in_text else request, self.endpoint.name, rejected
            )
            begun = False
            try:
                async with aclosing(self._stream(request, body, calls_in_text)) as events:
                    async for event in events:
                        begun = True
                        yield event
                return
            except ProviderError as error:
                rejected_key = None if begun else self._rejected_key(error, body)
                if rejected_key is None:
                    raise
                self._rejected_keys[key] = rejected | {rejected_key}

    async def models(self) -> list[ModelCard]:
        """Request and return the list of the endpoint's models; see `Provider`."""
        body = await self._connection.get(self._api_format.models_path)
        try:
            return model_cards(body)
        except ValueError:
            raise ProviderError("invalid", f"{self.endpoint.name} does not list its models") from None

    async def close(self) -> None:
        """Close the connections to the endpoint; see `Provider`."""
        await self._connection.close()

    async def _stream(self, request: ModelRequest, body: Json, calls_in_text: bool) -> AsyncGenerator[ModelEvent, None]:
        reader = self._api_format.reader(request, self.endpoint.name)
        marker_reader = (
            MarkerReader(request, calls_requested=calls_in_text)
            if calls_in_text or self._api_format.leaks_markers
            else None
        )
        ended = False
        stream = self._connection.events(self._api_format.path, body, self._api_format.headers(request))
        async with aclosing(stream) as events:
            async for event in events:
                for model_event in reader.feed(event):
                    for output in marker_reader.read(model_event) if marker_reader else (model_event,):
                        yield output
        for event in reader.end():
            ended = ended or isinstance(event, End)
            for output in marker_reader.read(event) if marker_reader else (event,):
                yield output
        if not ended:
            raise ProviderError("interrupted", f"{self.endpoint.name} ended its answer before it was complete")

    def _rejected_key(self, error: ProviderError, body: Json) -> str | None:
        """Return the optional key of the request body that the endpoint rejected.

        Return None if the error has another cause, or if the key must not be omitted.
        """
        present = body.keys() | {key for value in body.values() if isinstance(value, dict) for key in value}
        if _TOOLS in present and self.endpoint.tool_calls == "auto" and rejects_tools(error):
            return _TOOLS
        return next((key for key in self._api_format.optional if key in present and rejects(error, key)), None)
