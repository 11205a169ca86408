"""Why a request to a node failed, as far as the connection shows."""


class UpstreamError(Exception):
    """An answer that did not come, or broke off."""


class NotReached(UpstreamError):
    """No connection: the node has seen nothing of the request."""


class LocalError(UpstreamError):
    """No connection because the gateway is out of descriptors, ports or memory; the node is not to blame."""


class BrokenOff(UpstreamError):
    """The connection ended, or what came over it is not HTTP."""


class Silent(UpstreamError):
    """A timeout on silence expired. The node received the request and may still be working on it."""
