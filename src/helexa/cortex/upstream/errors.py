"""Connection-level errors of requests to a node."""


class UpstreamError(Exception):
    """A response that did not arrive, or broke off."""


class NotReached(UpstreamError):
    """No connection: the node has not received the request."""


class LocalError(UpstreamError):
    """No connection, because the gateway is out of descriptors, ports or memory; the node is not the cause."""


class BrokenOff(UpstreamError):
    """The connection ended, or its bytes are not HTTP."""


class Silent(UpstreamError):
    """A timeout on silence expired.

    The node received the request and may still be working on it.
    """
