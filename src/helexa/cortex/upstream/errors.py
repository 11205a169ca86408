"""Connection-level errors of requests to a node."""


class UpstreamError(Exception):
    """Base class of errors of requests to a node. No response arrived, or the response is incomplete."""


class ConnectError(UpstreamError):
    """The connection to the node failed, so the node has not received the request."""


class LocalConnectError(UpstreamError):
    """The gateway could not connect to the node, because it is out of file descriptors, ports or memory."""


class IncompleteResponseError(UpstreamError):
    """The connection ended before the response was complete, or the node sent invalid HTTP."""


class ReadTimeoutError(UpstreamError):
    """The node sent no data within a timeout.

    The node received the request and may still be working on it.
    """
