"""Notifications to systemd."""

import socket
from pathlib import Path

import pytest

from helexa.http.process import notify


@pytest.mark.parametrize("abstract", [False, True])
def test_ready_state_arrives_at_the_socket_of_the_service_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool
) -> None:
    address = "@helexa-notify-test" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + address[1:] if abstract else address)
        manager.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        notify("READY=1")
        assert manager.recv(100) == b"READY=1"


@pytest.mark.parametrize("address", [None, "", "relative", "/nowhere/notify"])
def test_ready_notification_without_a_service_manager_does_nothing(
    monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    if address is not None:
        monkeypatch.setenv("NOTIFY_SOCKET", address)
    notify("READY=1")
