"""`cortex keys` run as a process, on both databases."""

import json
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cortex.cortex_process import run
from cortex.running_gateway import eventually
from helexa.core.errors import ApiError
from helexa.cortex.access.auth import Authenticator
from helexa.cortex.ledger.keys_and_nodes import KeyStore
from helexa.cortex.ledger.storage import open_database


@pytest.fixture
def config(tmp_path: Path, url: str) -> str:
    (tmp_path / "models.toml").write_text('[[models]]\nid = "Org/M"\n[aliases]\nsmall = "Org/M"\n')
    path = tmp_path / "cortex.toml"
    path.write_text(
        f'models_config = "models.toml"\n[ledger]\nurl = "{url}"\n'
        '[[entitlements.keys]]\nkey = "static-s3cret"\naccount_id = "ops"\n'
    )
    return str(path)


@asynccontextmanager
async def watching_authenticator(url: str) -> AsyncIterator[Authenticator]:
    """Yield the authenticator of a gateway that is the only user of the ledger."""
    database = await open_database(url)
    try:
        await database.migrate()
        await database.claim()
        authenticator = Authenticator(True)
        async with KeyStore(database, apply=authenticator.replace).watching():
            yield authenticator
    finally:
        await database.close()


def is_rejected(authenticator: Authenticator, secret: str) -> bool:
    try:
        authenticator.admit([(b"authorization", f"Bearer {secret}".encode())])
    except ApiError:
        return True
    return False


async def test_first_key_is_created_before_any_gateway_ran(config: str, url: str) -> None:
    code, out, err = await run("keys", "list", "-c", config)
    assert (code, err) == (0, "")
    assert out.splitlines()[1].split()[:3] == ["ops", "ops", "user"]
    code, out, err = await run("keys", "create", "--account", "ops", "--name", "root", "--admin", "-c", config)
    assert (code, err) == (0, "")
    secret = out.splitlines()[0]
    async with watching_authenticator(url) as authenticator:
        assert authenticator.admit_admin([(b"x-api-key", secret.encode())]).key_id == "root"
    if url.startswith("sqlite:"):
        file = Path(url.removeprefix("sqlite:"))
        assert str(file) in out
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    else:
        assert "the ledger test_" in out


async def test_command_keys_create_accepts_option_models_several_times(config: str) -> None:
    with Path(config).with_name("models.toml").open("a") as file:
        file.write('gone = "Org/Gone"\n')
    models = ["--models", "Org/M", "--models", "Org/A, Org/B"]
    code, out, err = await run("keys", "create", "--account", "x", *models, "--json", "-c", config)
    assert (code, err) == (0, "")  # no warning about the alias `gone`, which has nothing to do with the key
    assert json.loads(out)["models"] == ["Org/A", "Org/B", "Org/M"]


async def test_running_gateway_accepts_created_and_rejects_revoked_keys(config: str, url: str) -> None:
    async with watching_authenticator(url) as authenticator:
        code, out, err = await run(
            *("keys", "create", "-c", config, "--account", "bob", "--key-id", "bob-1", "--models", "small, Org/X"),
            *("--cap", "1000", "--window", "24h", "--rpm", "5", "--tpm", "6", "--concurrency", "7"),
            *("--expires", "30d", "--json"),
        )
        assert (code, err) == (0, "")
        created = json.loads(out)
        secret = created.pop("key")
        assert created["models"] == ["Org/M", "Org/X"]
        assert created["window"] == {"kind": "rolling", "seconds": 86400}
        assert (created["hard_cap"], created["requests_per_minute"], created["tokens_per_minute"]) == (1000, 5, 6)
        assert created["expires_at"] - created["created_at"] == pytest.approx(30 * 86400, abs=60)
        await eventually(lambda: not is_rejected(authenticator, secret))

        code, out, err = await run("keys", "list", "-c", config, "--json")
        listed = json.loads(out)
        assert (code, err, listed[1:]) == (0, "", [created | {"spent": 0}])
        assert listed[0]["source"] == "config"
        assert "s3cret" not in out and secret not in out

        code, out, err = await run("keys", "revoke", "bob-1", "-c", config)
        assert (code, err) == (0, "")
        await eventually(lambda: is_rejected(authenticator, secret))
        code, out, _ = await run("keys", "list", "-c", config)
        assert out.splitlines()[2].split()[-1] == "revoked"
        assert secret not in out


@pytest.mark.parametrize(
    ("arguments", "expected", "message"),
    [
        (["create", "--account", "a b"], 1, "account_id: "),
        (["create", "--account", "a", "--window", "soon"], 2, "'soon' is not a duration"),
        (["create", "--account", "a", "--expires", "0d"], 2, "'0d' is not a duration"),
        (["create", "--account", "a", "--cap", "-1"], 1, "hard_cap: "),
        (["create", "--account", "a", "--key-id", "ops"], 1, "is defined in cortex.toml"),
        (["revoke", "ops"], 1, "is defined in cortex.toml"),
        (["revoke", "nobody"], 1, "key 'nobody' not found"),
    ],
)
@pytest.mark.parametrize("url", ["sqlite"], indirect=True)  # the errors do not depend on the database
async def test_errors_of_key_commands_are_one_line(
    config: str, arguments: list[str], expected: int, message: str
) -> None:
    code, out, err = await run("keys", *arguments, "-c", config)
    assert (code, out, err.count("\n")) == (expected, "", 1)
    assert message in err


async def test_command_keys_revoke_with_an_account_name_lists_the_keys_of_the_account(config: str) -> None:
    for key_id in ("ana-1", "ana-2"):
        await run("keys", "create", "--account", "ana", "--key-id", key_id, "-c", config)
    await run("keys", "revoke", "ana-1", "-c", config)
    code, out, err = await run("keys", "revoke", "ana", "-c", config)
    assert (code, out, err) == (1, "", "cortex: key 'ana' not found; keys of the account 'ana': ana-2\n")


async def test_missing_database_prints_one_line_without_the_password(tmp_path: Path) -> None:
    path = tmp_path / "cortex.toml"
    urls = {"postgresql://me:pa55@127.0.0.1:9/x": 1, "mysql://me:pa55@h/x": 78, f"sqlite:{tmp_path}": 1}
    for url, expected in urls.items():
        path.write_text(f'[ledger]\nurl = "{url}"\n')
        code, out, err = await run("keys", "list", "-c", str(path))
        assert (code, out, err.count("\n")) == (expected, "", 1)
        assert "pa55" not in err
