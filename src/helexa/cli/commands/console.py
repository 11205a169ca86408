"""`helexa console`: a link that signs a browser in to the console."""

import os

from helexa.cli.gateway_client import Gateway
from helexa.cli.terminal_output_and_errors import CommandError, note
from helexa.cli.up_state_keys_and_logs import key_of_local_gateway, local_gateway
from helexa.cortex.access.sign_in_links import LIFETIME_SECS, sign_in_url


def console(*, url: str | None = None) -> None:
    """Print a link that opens the console and signs the browser in as an admin.

    The link works once, in a browser on this machine. For a gateway that `helexa up` did not start, HELEXA_API_KEY must
    contain an admin's key of the gateway's cortex.toml.

    Args:
        url: Gateway of the console, else HELEXA_BASE_URL, else that of the `helexa up` on this machine.
    """
    # The first request is sent without the API key, because another program, not a gateway, may listen at the URL.
    gateway = Gateway(local_gateway(url).url)
    session = gateway.get("/api/session")
    if not isinstance(session, dict) or not session.get("links"):
        raise CommandError(
            f"{gateway.url} accepts no sign-in links: the console must be enabled, an admin's key must be in its "
            "cortex.toml, and the gateway must be on this machine; open the URL and sign in with an API key"
        )
    key = key_of_local_gateway(gateway.url) or os.environ.get("HELEXA_API_KEY")
    if not key:
        raise CommandError(f"{gateway.url} needs an admin's key; set HELEXA_API_KEY to an admin's key in cortex.toml")
    print(sign_in_url(gateway.url, key), flush=True)
    note(f"the link works once, for {LIFETIME_SECS // 60} minutes, in a browser on this machine")
