"""Checks that the gateway's listen address is safe without keys."""

from helexa.core.errors import ConfigError
from helexa.cortex.config import CortexConfig
from helexa.http.origin import is_loopback


def check_exposure(config: CortexConfig) -> None:
    """Raise if the gateway would serve a network without keys and the configuration does not allow it explicitly.

    Raises:
        ConfigError: the message names the three ways to resolve the conflict.
    """
    listen = config.gateway.listen
    if config.entitlements.require_auth or config.gateway.insecure or is_loopback(listen.host):
        return
    raise ConfigError(
        f"{listen} can be reached from other machines, and nobody would need a key: listen on 127.0.0.1, or set "
        "entitlements.require_auth = true (`cortex keys create` makes keys), or, if everybody on that network may use "
        "it, say --insecure or gateway.insecure = true"
    )
