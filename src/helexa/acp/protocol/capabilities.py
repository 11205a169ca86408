"""What editor and agent announce in `initialize`: versions and optional features."""

from dataclasses import dataclass
from typing import Any

from helexa.acp.config import agent_version
from helexa.acp.protocol.json_rpc import invalid_params

PROTOCOL_VERSION = 1
AUTH_METHOD = "configuration"


@dataclass(frozen=True, slots=True)
class ClientCapabilities:
    """The optional protocol features that the editor supports.

    Before the editor has sent `initialize`, all fields are False.
    """

    reads_files: bool = False
    writes_files: bool = False
    runs_commands: bool = False
    notices: bool = False
    compactions: bool = False


def read_capabilities(params: dict[str, Any]) -> ClientCapabilities:
    """Return the editor's capabilities from its `initialize` request."""
    # The parameters must be raw JSON, because the SDK's classes drop fields that they do not know.
    capabilities = _member(params, "clientCapabilities")
    files, session = _member(capabilities, "fs"), _member(capabilities, "session")
    return ClientCapabilities(
        reads_files=files.get("readTextFile") is True,
        writes_files=files.get("writeTextFile") is True,
        runs_commands=capabilities.get("terminal") is True,
        notices=isinstance(session.get("notices"), dict),
        compactions=isinstance(session.get("compaction"), dict),
    )


def initialize_result(params: dict[str, Any]) -> dict[str, Any]:
    """Return the result of `initialize`: version and capabilities of the agent.

    Raises:
        RpcError: the parameters contain no protocol version.
    """
    version_number = params.get("protocolVersion")
    if isinstance(version_number, bool) or not isinstance(version_number, int):
        raise invalid_params(
            f"protocolVersion is {str(version_number)[:100]!r}, but must be an integer such as {PROTOCOL_VERSION}"
        )
    return {
        "protocolVersion": PROTOCOL_VERSION,
        "agentInfo": {"name": "helexa-acp", "title": "helexa", "version": agent_version()},
        "agentCapabilities": {
            "loadSession": True,
            "promptCapabilities": {"image": True, "audio": False, "embeddedContext": True},
            "mcpCapabilities": {"http": True, "sse": True},
            "sessionCapabilities": {
                "list": {},
                "resume": {},
                "close": {},
                "delete": {},
                "additionalDirectories": {},
            },
            "auth": {"logout": {}},
        },
        "authMethods": [
            {
                "id": AUTH_METHOD,
                "name": "Configuration",
                "description": "Endpoints and their keys come from helexa-acp's config.toml, or from "
                "HELEXA_ACP_BASE_URL, HELEXA_ACP_MODEL and HELEXA_ACP_API_KEY in the environment.",
            }
        ],
    }


def _member(parent: dict[str, Any], name: str) -> dict[str, Any]:
    member = parent.get(name)
    return member if isinstance(member, dict) else {}
