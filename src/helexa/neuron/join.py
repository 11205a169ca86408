"""`neuron join`: makes this machine a node of a gateway by invitation.

`prepare` writes the node's key and its address into neuron.toml. `JoinRequest.send` then asks the gateway to add the
node. The gateway connects to the node and checks the key, so the node must be running at that time.
"""

import ipaddress
import json
import os
import pwd
import re
import secrets
import socket
import ssl
import subprocess
import time
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib import request
from urllib.error import HTTPError
from urllib.parse import urlsplit

from pydantic import SecretStr

from helexa.core.address import base_url, is_loopback, without_api_path
from helexa.core.config import read_secret
from helexa.core.display import printable
from helexa.core.errors import ConfigError, HelexaError, UsageError
from helexa.neuron.config import NeuronConfig, read_config

KEY_FILE = "node.key"
_SEND_SECS = 60.0
_LOCAL_SECS = 5.0
_START_SECS = 60.0
_FIRST_TABLE = re.compile(r"^[ \t]*\[", re.MULTILINE)


class UnreachableError(HelexaError):
    """The gateway does not answer."""

    exit_code = 3


@dataclass(frozen=True)
class JoinRequest:
    """A request to join a gateway."""

    gateway: str
    token: SecretStr
    name: str
    url: str
    key: SecretStr = field(repr=False)

    def send(self) -> str:
        """Ask the gateway to add this node; return the URL that it uses for the node.

        Raises:
            UnreachableError: the gateway does not answer, or its certificate is not trusted.
            HelexaError: the gateway rejects the request, with the gateway's message, or is no gateway of helexa.
        """
        body = {"token": self.token.get_secret_value(), "name": self.name, "url": self.url}
        data = json.dumps(body | {"key": self.key.get_secret_value()}).encode()
        url = f"{self.gateway}/api/join"
        try:
            with _opener().open(
                request.Request(url, data, {"Content-Type": "application/json"}), timeout=_SEND_SECS
            ) as response:
                return str(json.load(response)["endpoint"])
        except HTTPError as error:
            with error:
                raise HelexaError(f"{self.gateway} did not add this node: {_message(error)}") from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLCertVerificationError):
                hint = "set SSL_CERT_FILE to a file with the CA of the gateway"
                raise UnreachableError(
                    f"the certificate of {self.gateway} is not trusted: {reason.verify_message}; {hint}"
                ) from None
            raise UnreachableError(
                f"{self.gateway} did not answer: {printable(str(reason))}; check the URL and the network"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise HelexaError(f"{url} did not answer as a gateway of helexa does; check the URL") from None


def prepare(
    gateway: str, token: SecretStr, *, name: str | None, address: str | None, path: Path, service: str | None = None
) -> tuple[JoinRequest, NeuronConfig, list[str]]:
    """For `neuron join`: write the node's key and address into neuron.toml if missing.

    Args:
        address: URL under which the gateway reaches the node. None means the address from which this machine reaches
            the gateway.
        path: path of neuron.toml. A new key is written to the file `KEY_FILE` in the same folder.
        service: systemd unit whose user must be able to read the key, or None.

    Returns:
        The request to send while the node is running, the configuration, and a line for each change of a file.

    Raises:
        ConfigError: a file cannot be read or changed, or NEURON_HOST replaces the new address.
        UnreachableError: the host of the gateway is unknown.
        UsageError: a URL is invalid, or the gateway would be reached over the public internet without TLS.
    """
    gateway, own_address = _checked_gateway(gateway)
    settings = read_config(path if path.exists() else None)
    url = _checked_url("--address", address or _url(own_address, settings.port))
    host = urlsplit(url).hostname or ""
    changes: dict[str, str] = {}
    # With https, a proxy on this machine may forward to the loopback address, so `host` need not change.
    if urlsplit(url).scheme == "http" and is_loopback(settings.host) and not is_loopback(host):
        # If the address belongs to a NAT or a load balancer, this machine cannot bind it, and the node must listen on
        # all its addresses.
        changes["host"] = host if _is_own(host) else "0.0.0.0"
    done: list[str] = []
    key_path = path.absolute().parent / KEY_FILE
    if settings.api_key is None:
        done += _write_key(key_path, service)
        changes["api_key_file"] = KEY_FILE
    if changes:
        _change(path, changes)
        done += [f'{path}: {name} = "{value}"' for name, value in changes.items()]
        settings = read_config(path)
    # Environment variables take precedence over the file, so the written value may have no effect.
    for name_, value in changes.items():
        if name_ == "host" and settings.host != value:
            raise ConfigError(
                f"the environment variable NEURON_HOST replaces host in {path}; set NEURON_HOST to {value}, or unset it"
            )
    if settings.api_key is None:
        raise ConfigError(f"{path}: api_key_file names no key; write {KEY_FILE} there")
    return JoinRequest(gateway, token, name or _host_name(), url, settings.api_key), settings, done


def is_running(settings: NeuronConfig) -> bool:
    """For `neuron join`: return whether a server listens at the node's address."""
    try:
        with socket.create_connection((_local_host(settings), settings.port), timeout=_LOCAL_SECS):
            return True
    except OSError:
        return False


def accepts_key(settings: NeuronConfig) -> bool:
    """For `neuron join`: return whether a node accepts the configured key."""
    key = "" if settings.api_key is None else settings.api_key.get_secret_value()
    try:
        with _opener().open(
            request.Request(
                f"{_url(_local_host(settings), settings.port)}/discovery", headers={"Authorization": f"Bearer {key}"}
            ),
            timeout=_LOCAL_SECS,
        ) as response:
            return response.status == 200
    except (OSError, HTTPException):
        return False


def restart(service: str, settings: NeuronConfig) -> None:
    """For `neuron join`: restart a systemd unit; wait until its node accepts the key.

    Raises:
        HelexaError: systemd cannot restart the unit, or the node does not answer within 60 s.
    """
    try:
        subprocess.run(["systemctl", "restart", service], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise HelexaError(
            f"systemctl restart {service} failed: {error}; `journalctl -u {service}` shows its log"
        ) from None
    deadline = time.monotonic() + _START_SECS
    while not accepts_key(settings):
        if time.monotonic() > deadline:
            raise HelexaError(
                f"the node of {service} does not answer {_START_SECS:.0f} s after its restart; "
                f"`journalctl -u {service}` shows its log"
            )
        time.sleep(0.2)


def _checked_gateway(url: str) -> tuple[str, str]:
    """Return the gateway's base URL and this machine's address toward it."""
    url = _checked_url("the URL of the gateway", url)
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)
        family, *_, location = found[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(location)  # for UDP, this only selects a route, and sends nothing
            own_address = str(probe.getsockname()[0])  # the address that the routing table chooses for this gateway
    except OSError as error:
        raise UnreachableError(
            f"{url} cannot be reached: {error.strerror or error}; check the URL and the network"
        ) from None
    if parts.scheme == "http" and ipaddress.ip_address(str(location[0]).partition("%")[0]).is_global:
        raise UsageError(f"{url} is a public address, where others could read the token and the key; use https")
    return url, own_address


def _checked_url(name: str, url: str) -> str:
    try:
        return without_api_path(base_url(url))
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from None


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _local_host(settings: NeuronConfig) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(settings.host, settings.host)


def _is_own(host: str) -> bool:
    """Return whether `host` is an IP address of this machine."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind((host, 0))
    except (OSError, ValueError):
        return False
    return True


def _host_name() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname().partition(".")[0]).lstrip("-._")[:63] or "node"


def _write_key(path: Path, service: str | None) -> list[str]:
    """Create the node's key file if there is none; return a line for each change."""
    if path.exists():
        read_secret(path, "the key of the node")
        return []
    try:
        # The file is created with its final mode, because other users could open it before a later chmod.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"hlxnode_{secrets.token_urlsafe(32)}\n")
        if (group := _group_of(service)) is not None:
            os.chown(path, -1, group)
            path.chmod(0o640)
    except OSError as error:
        raise _unwritable(path, error) from None
    return [f"{path}: the new key of this node"]


def _group_of(service: str | None) -> int | None:
    """Return the group id of the user of a systemd unit; None if unknown or no unit."""
    if service is None:
        return None
    try:
        shown = subprocess.run(
            ["systemctl", "show", "-p", "User", "--value", service], capture_output=True, text=True, check=True
        )
        return pwd.getpwnam(shown.stdout.strip()).pw_gid
    except (OSError, subprocess.CalledProcessError, KeyError):
        return None


def _change(path: Path, changes: dict[str, str]) -> None:
    """Set top-level strings in a TOML file; ConfigError if they would not take effect."""
    lines = [f'{name} = "{value}"' for name, value in changes.items()]
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        table = _FIRST_TABLE.search(text)
        # Only the lines above the first table are top-level settings. The rest of the file stays as it is, with its
        # comments, which a TOML writer would drop.
        head, tail = (text[: table.start()], text[table.start() :]) if table else (text, "")
        for name, line in zip(changes, lines, strict=True):
            head, count = re.subn(rf"^{name}\s*=\s*(\"[^\"]*\"|'[^']*')", lambda _, line=line: line, head, flags=re.M)
            if not count:
                head = f"{head.rstrip()}\n{line}\n".lstrip() + ("\n" if tail else "")
        # The temporary file is in the same folder, because a rename is atomic only within one file system.
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(head + tail, encoding="utf-8")
        if path.exists():
            stat = path.stat()
            os.chown(temporary, stat.st_uid, stat.st_gid)
            temporary.chmod(stat.st_mode & 0o7777)
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        settings = read_config(temporary, environ={})
        # The file may have these names in a form that the pattern does not match, for example in multi-line text.
        if any(str(getattr(settings, name)) != value for name, value in changes.items()):
            raise ConfigError("")
        temporary.replace(path)
    except ConfigError:
        temporary.unlink()
        raise ConfigError(
            f"{path} cannot be changed; write these lines into the file, above all tables: {'; '.join(lines)}"
        ) from None


def _unwritable(path: Path, error: OSError) -> ConfigError:
    if isinstance(error, FileNotFoundError):
        return ConfigError(f"the folder {path.parent} does not exist; create it, or choose --config")
    return ConfigError(f"{path} cannot be written ({error.strerror}); run the command with sudo, or choose --config")


def _opener() -> request.OpenerDirector:
    """Return a URL opener without proxies and redirects, which could leak the token."""
    opener = request.OpenerDirector()
    for handler in (
        request.HTTPHandler(),
        request.HTTPSHandler(),
        request.HTTPErrorProcessor(),
        request.HTTPDefaultErrorHandler(),
        request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener


def _message(error: Any) -> str:
    """Return the message of an error response, or its HTTP status."""
    try:
        return printable(json.loads(error.read(1 << 16))["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"HTTP {error.code}"
