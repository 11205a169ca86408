"""The dialog that loads models, in Chromium: models of the nodes' disks, and downloads by name."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Route, expect

import browsing
from cortex.console.conftest import SignIn
from cortex.console.fake_fleet import FakeFleet, running
from cortex.fake_node import FakeNode

ON_DISK, NEW = "Org/On-Disk-GGUF", "Other/New:Q4_K_M"


@pytest.fixture(scope="module")
def stored() -> Iterator[FakeFleet]:
    """A gateway whose node has a model on its disk that the catalog does not list."""
    node = FakeNode(name="n1").holds("Org/M").with_accelerator(24_000, {ON_DISK: 4000, NEW: 5000})
    node.stores(ON_DISK, size_bytes=3_000_000_000, memory_mb=4000, form="Q4_K_M")
    node.stores("Org/Broken", problem="the file is truncated")
    with running(node, models=[{"id": "Org/M"}]) as fleet:
        yield fleet


def test_load_dialog_lists_a_model_on_a_nodes_disk_and_loads_it(sign_in: SignIn, stored: FakeFleet) -> None:
    page = sign_in(url=stored.url)
    page.get_by_role("button", name="Load model…").click()
    dialog = page.get_by_role("dialog", name="Load a model")
    expect(dialog.get_by_role("radio", name="Org/Broken")).to_be_visible()
    expect(dialog).to_contain_text("the file is truncated")
    dialog.get_by_label("Model", exact=True).fill("on-disk")
    expect(dialog.get_by_role("radio", name="Org/Broken")).to_have_count(0)
    choice = dialog.get_by_role("radio", name=ON_DISK)
    expect(dialog).to_contain_text("on the disk of n1 · Q4_K_M · 3.0 GB of files · needs 3.9 GB of memory")
    choice.check()
    expect(dialog).to_contain_text("would load")
    dialog.get_by_role("button", name="Load", exact=True).click()
    expect(page.locator(".node").get_by_role("row", name=ON_DISK)).to_contain_text("warm")
    assert [spec["model_id"] for spec in stored.nodes["n1"].loads] == [ON_DISK]


def test_load_dialog_downloads_a_named_model_shows_progress_and_chooses_it(sign_in: SignIn, stored: FakeFleet) -> None:
    node = stored.nodes["n1"]
    page = sign_in(url=stored.url)
    page.get_by_role("button", name="Load model…").click()
    dialog = page.get_by_role("dialog", name="Load a model")
    dialog.get_by_label("Model", exact=True).fill(NEW)
    dialog.get_by_role("button", name=f"Download {NEW}").click()
    dialog.get_by_role("progressbar", name=f"Downloading {NEW}").wait_for()
    dialog.get_by_role("button", name="Cancel download").click()
    expect(dialog).to_contain_text(f"The download of {NEW} to n1 is canceled.")
    dialog.get_by_role("button", name=f"Download {NEW}").click()
    while len(node.pulls) < 2:  # the first pull is canceled
        page.wait_for_timeout(10)
    node.pulls[-1] |= {"done": 98_400_000, "total": 4_000_000_000}
    expect(dialog).to_contain_text("download: 98 MB of 4.0 GB, to n1")
    page.evaluate(browsing.axe())
    assert browsing.violations(page) == []
    node.stores(NEW, size_bytes=4 << 30)
    node.pulls[-1]["status"] = "done"
    expect(dialog.get_by_role("radio", name=NEW)).to_be_checked()
    expect(dialog).to_contain_text("would load")


def test_model_name_typed_before_the_model_lists_arrive_is_chosen(sign_in: SignIn, stored: FakeFleet) -> None:
    page = sign_in(url=stored.url)
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page.route("**/api/models/local", hold)
    page.get_by_role("button", name="Load model…").click()
    dialog = page.get_by_role("dialog", name="Load a model")
    dialog.get_by_label("Model", exact=True).fill("Org/Broken")
    dialog.get_by_role("status", name="Loading the models").wait_for()
    for route in held:
        route.continue_()
    expect(dialog.get_by_role("radio", name="Org/Broken")).to_be_checked()
