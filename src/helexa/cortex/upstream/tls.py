"""TLS settings to check the certificates of servers, with the file `ca_file`."""

import ssl
from pathlib import Path

from helexa.core.errors import ConfigError


def client_context(ca_file: Path | None) -> ssl.SSLContext:
    """Return TLS settings with which a client checks the certificates of servers.

    Args:
        ca_file: PEM file with certificate authorities to trust besides the system's. None to trust only the system's.

    Raises:
        ConfigError: the file cannot be read or contains no certificate.
    """
    context = ssl.create_default_context()
    if ca_file is not None:
        try:
            context.load_verify_locations(ca_file)
        except ssl.SSLError:
            raise ConfigError(
                f"ca_file: {ca_file} contains no PEM certificate; name a PEM file with certificates"
            ) from None
        except OSError as error:
            message = f"ca_file: {ca_file} cannot be read ({error.strerror}); name a readable file, or remove ca_file"
            raise ConfigError(message) from None
    return context
