"""Sign-in links in Chromium, on a gateway that requires no keys, as on a laptop."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from cortex.console.conftest import SignIn
from cortex.console.fake_fleet import ADMIN, FakeFleet, running
from cortex.fake_node import FakeNode
from helexa.cortex.access.sign_in_links import sign_in_url


@pytest.fixture(scope="module")
def laptop() -> Iterator[FakeFleet]:
    with running(FakeNode(name="local").holds("Org/M"), require_auth=False) as fleet:
        yield fleet


def test_sign_in_link_works_once_and_its_token_is_removed_from_the_address_bar(
    sign_in: SignIn, laptop: FakeFleet
) -> None:
    link = sign_in_url(laptop.url, ADMIN)
    page = sign_in(None, url=laptop.url)
    page.get_by_role("button", name="Load model…").click()
    dialog = page.get_by_role("dialog", name="Sign in as an admin")
    expect(dialog).to_contain_text(f"helexa console --url {laptop.url}")
    page.goto(link)  # the page is open already, so the browser changes only the fragment
    page.get_by_role("button", name="Sign out").wait_for()
    expect(dialog).to_have_count(0)
    assert page.url == f"{laptop.url}/#/fleet"
    page.get_by_role("button", name="Actions for local", exact=True).click()
    page.get_by_role("menuitem", name="Cordon…").click()
    page.get_by_role("button", name="Cordon", exact=True).click()
    page.locator(".node").get_by_text("cordoned", exact=True).wait_for()

    second = sign_in(None, url=laptop.url)
    second.goto("about:blank")
    second.goto(link)
    expect(second.get_by_role("dialog")).to_contain_text("This sign-in link has expired or was used already")
    assert second.url == f"{laptop.url}/#/fleet"
