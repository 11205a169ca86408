"""Connection-level errors of requests to a node."""


class UpstreamError(Exception):
    """Base class of errors of requests to a node: no response arrived, or the response is incomplete."""


class NotReached(UpstreamError):
    """The connection to the node failed, so the node has not received the request."""


class LocalError(UpstreamError):
    """The gateway is out of descriptors, ports or memory, so it could not connect."""


class BrokenOff(UpstreamError):
    """The connection ended during a request, or the node's bytes are not HTTP."""


class Silent(UpstreamError):
    """The node sent no data within a timeout.

    The node received the request and may still be working on it.
    """
