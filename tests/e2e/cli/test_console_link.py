"""`helexa console`: where the key of a sign-in link comes from, and when there is no link."""

import re
from pathlib import Path

import pytest


def write_configuration(environ, url, listen):
    folder = Path(environ["XDG_STATE_HOME"], "helexa", "up", url.rpartition(":")[2])
    folder.mkdir(parents=True)
    keys = '[[entitlements.keys]]\nkey = "the-owners-key"\naccount_id = "owner"\nrole = "admin"\n'
    (folder / "cortex.toml").write_text(f'[gateway]\nlisten = "{listen}"\n{keys}')


def test_console_command_makes_a_sign_in_link_with_the_admin_key_stored_by_up(helexa, environ, gateway):
    write_configuration(environ, gateway.url, gateway.url.removeprefix("http://"))
    result = helexa("console", "--url", gateway.url)
    assert result.returncode == 0
    assert re.fullmatch(rf"{gateway.url}/#/link/[\w-]{{40}}\n", result.stdout)
    assert result.stderr == "the link works once, for 10 minutes, in a browser on this machine\n"
    assert "the-owners-key" not in result.stdout
    assert gateway.authorization is None  # the key stays on this machine


def test_console_command_makes_a_sign_in_link_with_the_key_in_the_environment_variable(helexa, gateway):
    result = helexa("console", "--url", gateway.url, HELEXA_API_KEY="an-admins-key")
    assert (result.returncode, result.stdout.startswith(f"{gateway.url}/#/link/")) == (0, True)
    assert gateway.authorization is None


@pytest.mark.parametrize(
    ("links", "message"),
    [
        (True, "helexa: {url} needs an admin's key; set HELEXA_API_KEY to an admin's key in cortex.toml\n"),
        (
            False,
            "helexa: {url} accepts no sign-in links: the console must be enabled, an admin's key must be in its "
            "cortex.toml, and the gateway must be on this machine; open the URL and sign in with an API key\n",
        ),
    ],
)
def test_console_command_that_cannot_make_a_sign_in_link_prints_the_reason_in_one_line(helexa, gateway, links, message):
    gateway.session["links"] = links
    result = helexa("console", "--url", gateway.url)
    assert (result.returncode, result.stdout, result.stderr) == (1, "", message.format(url=gateway.url))
