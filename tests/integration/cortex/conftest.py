"""Makes the gateway fixtures available."""

from cortex.gateway_fixtures import cortex, node

__all__ = ["cortex", "node"]
