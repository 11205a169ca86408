"""`cortex nodes` on the gateway's host."""

import asyncio
import json
from pathlib import Path

import pytest
from pydantic import SecretStr

from helexa.core.errors import HelexaError
from helexa.cortex.key_and_node_commands import invite, list_nodes, remove
from helexa.cortex.ledger.keys_and_nodes import NodeStore
from helexa.cortex.ledger.storage import open_database


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "cortex.toml"
    path.write_text(
        f'[ledger]\nurl = "sqlite:{tmp_path}/cortex.db"\n[[neurons]]\nname = "fixed"\nendpoint = "http://10.0.0.1:13131"\n'
    )
    return path


def join(config: Path, token: str) -> None:
    async def add() -> None:
        database = await open_database(f"sqlite:{config.parent}/cortex.db")
        store = NodeStore(database)
        invitation = await store.invitation(token)
        assert invitation is not None
        await store.add(invitation, "beast", "http://10.0.0.2:13131", SecretStr("key-of-the-node"))
        await database.close()

    asyncio.run(add())


def test_node_commands_invite_list_and_remove_nodes(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    invite(config=config, url="https://llm.example.com", name="beast")
    command = capsys.readouterr().out.splitlines()[0]
    assert command.startswith("helexa node join https://llm.example.com --token hlxjoin_")
    assert command.endswith(" --name beast")
    join(config, command.split()[5])
    list_nodes(config=config)
    listing = capsys.readouterr().out
    assert [line.split()[:4] for line in listing.splitlines()[1:]] == [
        ["fixed", "http://10.0.0.1:13131", "neuron", "config"],
        ["beast", "http://10.0.0.2:13131", "neuron", "joined"],
    ]
    assert "key-of-the-node" not in listing
    remove("beast", config=config)
    list_nodes(config=config, as_json=True)
    assert [node["name"] for node in json.loads(capsys.readouterr().out.partition("\n")[2])] == ["fixed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"expires": "8d"}, "longer than 7d"),
        ({"expires": "soon"}, "duration"),
        ({"network": ["10.0.0.0/99"]}, "--network is not a network"),
        ({"name": "a b"}, "--name"),
    ],
)
def test_error_of_an_invalid_invitation_names_the_option(
    config: Path, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(HelexaError, match=message):
        invite(config=config, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "message"), [("fixed", "remove the node there"), ("other", "no node named 'other'")])
def test_configured_or_unknown_node_cannot_be_removed_by_the_command(config: Path, name: str, message: str) -> None:
    with pytest.raises(HelexaError, match=message):
        remove(name, config=config)
