"""The `helexa-acp` command."""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from helexa.acp.config import agent_version


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main() -> NoReturn:
    """Run the command line.

    Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted.
    """
    parser = _Parser(
        prog="helexa-acp",
        description="A coding agent for editors that use the Agent Client Protocol over stdin and stdout. Editors "
        "start the agent. Its configuration file is HELEXA_ACP_CONFIG_PATH or ~/.config/helexa-acp/config.toml.",
    )
    parser.add_argument("--version", "-V", "-v", action="version", version=f"helexa-acp {agent_version()}")
    parser.parse_args()
    sys.exit(serve())


def serve() -> int:
    """Handle the editor's requests until it disconnects. Return the exit code."""
    try:
        _configure_log()
    except (OSError, ValueError) as error:
        print(f"helexa-acp: {error}", file=sys.stderr)
        return 2
    if find_spec("acp") is None:
        print("helexa-acp: the ACP SDK is not installed; install it with: pip install 'helexa[acp]'", file=sys.stderr)
        return 1
    logging.getLogger(__name__).info("started version=%s pid=%d", agent_version(), os.getpid())
    if sys.stdin.isatty():
        print("helexa-acp: waiting for JSON-RPC from an editor on stdin; see docs/acp.md.", file=sys.stderr)
    try:
        asyncio.run(_serve())
    except KeyboardInterrupt:
        return 130
    logging.getLogger(__name__).info("stopped; the editor disconnected")
    return 0


async def _serve() -> None:
    from helexa.acp.config import load
    from helexa.acp.protocol.server import StdioTransport
    from helexa.acp.protocol.server import serve as serve_client

    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serve_client(load, StdioTransport())


def _configure_log() -> None:
    """Set up logging to stderr, or to the file in HELEXA_ACP_LOG_FILE.

    The environment variable HELEXA_ACP_LOG sets the level.

    Raises:
        OSError: the file cannot be written.
        ValueError: the level is unknown.
    """
    level = os.environ.get("HELEXA_ACP_LOG", "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        raise ValueError(
            f"HELEXA_ACP_LOG is {level!r}, not a log level; set one of {', '.join(logging.getLevelNamesMapping())}"
        )
    path = os.environ.get("HELEXA_ACP_LOG_FILE")
    handler = logging.FileHandler(Path(path).expanduser(), delay=False) if path else logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    if level != "DEBUG":
        for noisy in ("httpx", "httpx2", "httpcore", "httpcore2", "openai", "anthropic", "mcp"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
