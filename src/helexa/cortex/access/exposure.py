"""Startup check: a gateway that requires no API keys may listen only on a loopback address."""

from helexa.core.errors import ConfigError
from helexa.cortex.config import CortexConfig
from helexa.http.origin import is_loopback


def check_exposure(config: CortexConfig) -> None:
    """Raise an error if other machines could send requests without an API key and `insecure` is not set.

    Raises:
        ConfigError: the gateway requires no API keys and listens on an address other than loopback. The message names
            the three ways to change the configuration.
    """
    listen = config.gateway.listen
    if config.entitlements.require_auth or config.gateway.insecure or is_loopback(listen.host):
        return
    raise ConfigError(
        f"{listen} is reachable from other machines, and no key is required: listen on 127.0.0.1; or set "
        "entitlements.require_auth = true and create keys with `cortex keys create`; or, to let all machines of the "
        "network use the gateway, use --insecure or set gateway.insecure = true"
    )
