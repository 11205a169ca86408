"""`helexa console`, and the addresses that `helexa up` prints."""

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

from helexa.cli.gateway_client import DEFAULT_URL, Gateway
from helexa.cli.local_config import LocalConfig
from helexa.cli.terminal import CommandError, note, printable
from helexa.cli.up_state import key_of_local_gateway, local_gateway
from helexa.cortex.access.sign_in_links import LIFETIME_SECS, sign_in_url


def console(*, url: str | None = None) -> None:
    """Print a link that opens the console and signs the browser in as an admin.

    The link works once, in a browser on this machine. For a gateway that `helexa up` did not start, HELEXA_API_KEY must
    contain an admin's key of the gateway's cortex.toml.

    Args:
        url: Gateway of the console, else HELEXA_BASE_URL, else that of the `helexa up` on this machine.
    """
    gateway = Gateway(local_gateway(url).url)  # without a key, which would be sent
    session = gateway.get("/api/session")
    if not isinstance(session, dict) or not session.get("links"):
        raise CommandError(
            f"{gateway.url} accepts no sign-in links: the console must be enabled, an admin's key must be in its "
            "cortex.toml, and the gateway must be on this machine; open the URL and sign in with an API key"
        )
    key = key_of_local_gateway(gateway.url) or os.environ.get("HELEXA_API_KEY")
    if not key:
        raise CommandError(f"set HELEXA_API_KEY to an admin's key of the cortex.toml of {gateway.url}")
    print(sign_in_url(gateway.url, key), flush=True)
    note(f"the link works once, for {LIFETIME_SECS // 60} minutes, in a browser on this machine")


def announce(config: LocalConfig, model: str, key: str, logs: Path) -> None:
    """Print how clients reach the servers that `helexa up` has started.

    Args:
        config: addresses of the servers.
        model: model of the example requests.
        key: API key of the gateway.
        logs: folder of the servers' logs.
    """
    url, require_key, model = config.gateway_url, config.require_auth, printable(model)
    ollama = f"\n  Ollama    {config.ollama_url}" if config.ollama else ""
    request = json.dumps({"model": model, "messages": [{"role": "user", "content": "Say hello."}]})
    chat = f"{_command()} chat" + ("" if url == DEFAULT_URL else f" --url {url}")
    export = f"export HELEXA_API_KEY={shlex.quote(key)}\n  " if require_key else ""
    bearer = '-H "Authorization: Bearer $HELEXA_API_KEY" ' if require_key else ""
    lan = "" if config.lan_url is None else f"\n            {config.lan_url}/v1 from other machines"
    print(
        f"""
helexa is up. Point any OpenAI client at it:

  base URL  {url}/v1{lan}
  model     {model}
  API key   {key if require_key else "any"}
  console   {_console(url, key)}{ollama}

Try it:

  {export}{chat}
  curl {url}/v1/chat/completions {bearer}-H 'Content-Type: application/json' -d {shlex.quote(request)}

Logs are in {logs} (`{_command()} logs -f` shows them); Ctrl-C or `{_command()} stop` stops everything.""",
        flush=True,
    )


def _console(url: str, key: str) -> str:
    """Return the address of the console.

    On a terminal, the address is a link that signs the browser in.

    A file or a service's journal keeps its lines, and others may read it before a user opens the link.
    """
    renew = f"`{_command()} console{'' if url == DEFAULT_URL else f' --url {url}'}`"
    if not sys.stdout.isatty():
        return f"{url}\n            {renew} prints a link that signs a browser on this machine in"
    limit = f"signs your browser in once, for {LIFETIME_SECS // 60} minutes"
    return f"{sign_in_url(url, key)}\n            {limit}; {renew} prints a new link"


def _command() -> str:
    """Return the shell command that starts `helexa` again.

    The command is `helexa` if a program of this name is on the PATH, else the path of the running program.
    """
    called = Path(sys.argv[0])
    if shutil.which("helexa"):
        return "helexa"
    return f"{shlex.quote(sys.executable)} -m helexa" if called.suffix == ".py" else shlex.quote(str(called))
