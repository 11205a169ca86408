"""Sign-in with OpenID Connect in Chromium."""

from playwright.sync_api import expect

from cortex.console.conftest import SignIn
from cortex.console.fake_fleet import running
from cortex.console.oidc_provider import Provider, settings
from cortex.fake_node import FakeNode


def test_oidc_sign_in_works_in_a_browser_with_a_provider_on_another_site(sign_in: SignIn) -> None:
    """The provider is another site than the gateway, so the browser treats the redirects as cross-site."""
    provider = Provider(claims={"email": "boss@example.com", "email_verified": True})
    node = FakeNode(name="n1").holds("Org/M")
    with running(node, also=provider.serving("localhost"), settings=lambda: settings(provider)) as fleet:
        fleet.cortex.gateway.config.console.oidc.public_url = fleet.url  # type: ignore[union-attr]
        page = sign_in(None, url=fleet.url)
        page.get_by_role("link", name="Sign in with your organization").click()
        expect(page.locator(".who")).to_contain_text("boss@example.com")
        page.locator(".node").first.wait_for()
        assert page.url == f"{fleet.url}/#/fleet"
        page.reload()
        expect(page.locator(".who")).to_contain_text("boss@example.com")
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("heading", name="Sign in to this gateway")).to_be_visible()
        page.goto("about:blank")
