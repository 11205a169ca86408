"""A gateway without free file descriptors does not count its errors against nodes."""

import json

import pytest

from cortex.fake_node import FakeNode
from cortex.raw_http import GET, connected, post, read_response
from cortex.running_gateway import open_client, running_cortex
from descriptors import no_descriptors
from helexa.cortex.config import NeuronSection, RoutingSection
from helexa.cortex.fleet.fleet import Fleet
from helexa.cortex.fleet.poller import Poller

FAILURES = RoutingSection().breaker_failures


async def test_requests_are_503_and_leave_the_breaker_closed_if_file_descriptors_run_out(node: FakeNode) -> None:
    async with running_cortex(node, poll_interval_secs=3600) as cortex, connected(cortex) as (reader, writer):
        writer.write(GET % b"")
        assert (await read_response(reader))[0] == 200  # the connection is accepted
        with no_descriptors():
            for _ in range(FAILURES + 1):
                writer.write(post())
                status, headers, body = await read_response(reader)
                assert (status, headers[b"retry-after"]) == (503, b"1")
                assert json.loads(body)["error"]["code"] == "rate_limit_exceeded"
        writer.write(post())
        assert (await read_response(reader))[0] == 200
        assert not cortex.gateway.fleet.view().open


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_polls_that_fail_for_lack_of_file_descriptors_are_not_missed_polls(node: FakeNode, host: str) -> None:
    fleet = Fleet([NeuronSection(name="node", endpoint=node.url.replace("127.0.0.1", host))], RoutingSection())
    async with open_client() as client:
        poller = Poller(fleet, client, 1.0)
        with no_descriptors():
            await poller.poll("node")
        assert fleet.node("node").misses == 0
        await poller.poll("node")
        assert fleet.node("node").healthy
