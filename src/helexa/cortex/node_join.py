"""Lets nodes join the fleet with an invitation.

A node is added only if it proves that its address and key are right.

An invitation must not turn the gateway into a tool for requests to other machines. Therefore the address of a node is
the address from which the node joins, or an address in the networks of its invitation.
"""

import asyncio
import logging
import math
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import urlsplit, urlunsplit

from pydantic import SecretStr

from helexa.core.errors import ApiError, overloaded
from helexa.core.logs import quoted
from helexa.core.node_reports import CHECK_KEY
from helexa.cortex.access.keys import new_secret
from helexa.cortex.fleet.node_client import NodeClient
from helexa.cortex.fleet.node_errors import NodeError
from helexa.cortex.ledger.keys_and_nodes import Invitation, NodeStore, invalid_invitation, node_exists

log = logging.getLogger(__name__)

ATTEMPTS_PER_MINUTE = 10
_MAX_CLIENTS = 4096
_MAX_PROOFS = 4
_RESOLVE_SECS = 5.0

IPAddress = IPv4Address | IPv6Address


class FailedAttempts:
    """Limits failed joins of a client: 10 at once, then 10 per minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # by network of the client: number of failures when the last failure was counted, and the time of this failure
        self._failures: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def check(self, client: str) -> None:
        """Raise ApiError 429 if the client has failed too often."""
        if (excess := self._count(_network(client)) + 1 - ATTEMPTS_PER_MINUTE) > 0:
            secs = max(1, math.ceil(excess * 60 / ATTEMPTS_PER_MINUTE))
            raise overloaded(
                f"too many attempts to join from this address have failed; try again in {secs} s", secs, status=429
            )

    def failed(self, client: str) -> None:
        """Count a failed attempt. Above `_MAX_CLIENTS` clients, forget the oldest failure."""
        network = _network(client)
        self._failures[network] = (self._count(network) + 1, self._clock())
        self._failures.move_to_end(network)
        if len(self._failures) > _MAX_CLIENTS:
            self._failures.popitem(last=False)

    def _count(self, network: str) -> float:
        count, counted_at = self._failures.get(network, (0.0, 0.0))
        return max(0.0, count - (self._clock() - counted_at) * ATTEMPTS_PER_MINUTE / 60)


class Joins:
    """Adds nodes that join with an invitation."""

    def __init__(
        self,
        nodes: NodeStore,
        client: NodeClient,
        known: Callable[[], Collection[tuple[str, str]]],
        observe: Callable[[str], None],
    ) -> None:
        self._nodes = nodes  # invitations, and the nodes that joined
        self._client = client
        self._known = known  # function that returns name and address of all nodes of the fleet
        # called with the outcome of each attempt: `joined`, `wrong_token`, `limited`, `rejected` or `unreachable`
        self._observe = observe
        self._attempts = FailedAttempts()
        self._proofs = asyncio.Semaphore(_MAX_PROOFS)

    async def join(self, token: str, name: str, endpoint: str, bearer: SecretStr, client: str) -> str:
        """Add a node, and return its address as the gateway uses it.

        Args:
            client: IP address from which the node joins.

        Raises:
            ApiError: 403 if the invitation is not valid or does not allow the name. 400 if the address is not allowed.
                409 if the name or the address is in use. 422 if the node does not answer at the address, or does not
                require the key `bearer`. 429 after too many failures of the client.
        """
        outcome = "limited"
        try:
            self._attempts.check(client)
            outcome = "wrong_token"
            invitation = await self._nodes.invitation(token)
            if invitation is None:
                raise invalid_invitation()
            outcome = "rejected"
            endpoint = await self._checked(invitation, name, endpoint, client)
            outcome = "unreachable"
            async with self._proofs:
                await prove(self._client, endpoint, bearer.get_secret_value())
            outcome = "rejected"
            await self._nodes.add(invitation, name, endpoint, bearer)
            outcome = "joined"
        except ApiError as error:
            # A rejected attempt above the limit is not logged, because a client could fill the log with attempts.
            if outcome != "limited":
                self._attempts.failed(client)
                fields = (quoted(name), client, outcome, quoted(error))
                log.warning("node did not join node=%s client=%s outcome=%s error=%s", *fields)
            raise
        finally:
            self._observe(outcome)
        log.info("node joined node=%s endpoint=%s client=%s invitation=%s", name, endpoint, client, invitation.hint)
        await self._nodes.refresh()
        return endpoint

    async def _checked(self, invitation: Invitation, name: str, endpoint: str, client: str) -> str:
        if invitation.node not in (None, name):
            message = f"the token is for a node with the name '{invitation.node}'; use it with --name {invitation.node}"
            raise ApiError(403, "name_not_allowed", message, param="name")
        endpoint = await allowed_endpoint(endpoint, client, invitation)
        for other_name, other_endpoint in self._known():
            if name == other_name or endpoint == other_endpoint:
                raise node_exists(other_name)
        return endpoint


async def allowed_endpoint(endpoint: str, client: str, invitation: Invitation) -> str:
    """Return the base URL of a node that joins, if the gateway may connect to it.

    Args:
        endpoint: the URL that the node announced. In an http URL, the result has an IP address as the host.
        client: IP address from which the node joins.

    Raises:
        ApiError: 400 if the URL has a path, if its host is unknown, or if an address of the host is not allowed.
    """
    # In an http URL, the host is replaced by its IP address. Otherwise a later change of the DNS entry could direct the
    # gateway's requests to another machine. An https URL keeps the host, because a certificate identifies the machine.
    parts = urlsplit(endpoint)
    if parts.path:
        raise _not_allowed(endpoint, "the URL has a path; announce only host and port")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    addresses = await _addresses(parts.hostname or "", port)
    if not addresses:
        raise _not_allowed(endpoint, "the gateway cannot resolve this host; announce an IP address with --address")
    for address in addresses:
        if problem := _problem(address, parts.scheme, _parsed(client), invitation):
            raise _not_allowed(endpoint, problem)
    if parts.scheme == "https":
        return endpoint
    host = f"[{addresses[0]}]" if addresses[0].version == 6 else str(addresses[0])
    return urlunsplit((parts.scheme, f"{host}:{port}", "", "", ""))


async def prove(client: NodeClient, endpoint: str, bearer: str) -> None:
    """Check that a joining node answers, and that it requires the key `bearer`.

    Raises:
        ApiError: 422 if the check failed. The message says what to do.
    """
    # A node that requires its key rejects this random key with status 401.
    try:
        await client.get(endpoint, "/discovery", CHECK_KEY + new_secret().get_secret_value())
    except NodeError as error:
        if error.status != 401:
            hint = "start the node, and open its port for the gateway; if the address is wrong, join with --address"
            raise _unproven(f"the gateway gets no answer from a node at {endpoint} ({error}); {hint}") from None
    else:
        raise _unproven(f"the node at {endpoint} requires no key; set api_key in its configuration")
    try:
        await client.discovery(endpoint, bearer)
        await client.models(endpoint, bearer)
    except NodeError as error:
        if error.status in (401, 403):
            problem = "does not accept the API key that it announced"
            hint = "restart the node, so that it uses the key in its configuration"
        else:
            problem = "does not report its hardware and models"
            hint = "see the node's log"
        raise _unproven(f"the node at {endpoint} {problem} ({error}); {hint}") from None


async def _addresses(host: str, port: int) -> list[IPAddress]:
    try:
        async with asyncio.timeout(_RESOLVE_SECS):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TimeoutError):
        return []
    return [address for *_, location in found if (address := _parsed(str(location[0]))) is not None]


def _problem(address: IPAddress, scheme: str, client: IPAddress | None, invitation: Invitation) -> str | None:
    """Return why the gateway may not connect to `address`; None if it may."""
    if address.is_unspecified or address.is_multicast or address.is_link_local or address.is_reserved:
        return f"{address} is not the address of a machine; announce another address with --address"
    if any(address in network for network in invitation.networks):
        return None
    is_client = address == client or (address.is_loopback and client is not None and client.is_loopback)
    if not is_client:
        return (
            f"{address} is not {client}, the address from which this node joins; announce that address with "
            "--address, or allow the network with `cortex nodes invite --network`"
        )
    if scheme == "http" and address.is_global:
        return (
            f"{address} is a public address, where others could read the key and all prompts; use https or a private "
            "network, or allow the address with `cortex nodes invite --network`"
        )
    return None


def _parsed(text: str) -> IPAddress | None:
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _network(client: str) -> str:
    """Return a client's address, or for IPv6 its /64 network."""
    address = _parsed(client)
    return str(ip_network((address, 64), strict=False)) if address is not None and address.version == 6 else client


def _not_allowed(endpoint: str, problem: str) -> ApiError:
    return ApiError(400, "address_not_allowed", f"{endpoint} cannot be the address of a node: {problem}", param="url")


def _unproven(message: str) -> ApiError:
    return ApiError(422, "node_not_verified", message, param="url")
