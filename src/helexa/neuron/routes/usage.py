"""How a gateway asks a node for token counts that the gateway's client does not see."""

from starlette.requests import Request

_INCLUDE_USAGE = "x-helexa-include-usage"


def reports_usage(request: Request) -> bool:
    """Whether the gateway wants a usage chunk at the end of a stream, whatever `stream_options` says.

    The gateway drops this header from its clients' requests, adds its own, and removes the chunk for clients that did
    not ask for it.
    """
    return request.headers.get(_INCLUDE_USAGE) == "1"
