"""The user documentation matches the agent's configuration, commands and modes."""

import json
import re
from pathlib import Path

from helexa.acp.config import agent_version, load
from helexa.acp.protocol.capabilities import initialize_result
from helexa.acp.protocol.session_options import MODES
from helexa.acp.protocol.slash_commands import COMMANDS

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs/acp.md").read_text()


def test_example_configuration_is_valid(tmp_path: Path):
    environ = {"HELEXA_ACP_CONFIG_PATH": str(ROOT / "docs/acp.example.toml"), "HOME": str(tmp_path)}
    keys = {"OPENAI_API_KEY": "a", "ANTHROPIC_API_KEY": "b"}
    assert [endpoint.name for endpoint in load(environ | keys).endpoints] == ["home", "openai", "anthropic", "ollama"]
    assert [endpoint.name for endpoint in load(environ).endpoints] == ["home", "ollama"]


def test_user_guide_documents_every_command_and_mode():
    for command in COMMANDS:
        assert f"`/{command['name']}" in GUIDE
    for name, _ in MODES.values():
        assert f"| {name} |" in GUIDE
    for snippet in re.findall(r"```json\n(.*?)```", GUIDE, re.DOTALL):
        (server,) = json.loads(snippet)["agent_servers"].values()
        assert server["command"].endswith("helexa-acp")


def test_agent_registry_entry_has_the_version_of_this_package():
    entry = json.loads((ROOT / "deploy/acp/agent.json").read_text())
    assert entry["version"] == agent_version()
    assert entry["distribution"]["uvx"] == {"package": f"helexa[acp]=={agent_version()}", "args": ["acp"]}
    assert initialize_result({"protocolVersion": 1})["authMethods"]
    assert "currentColor" in (ROOT / "deploy/acp/icon.svg").read_text()
