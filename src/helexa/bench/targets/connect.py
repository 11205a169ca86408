"""Creates clients for the configured targets."""

from dataclasses import dataclass, field

import aiohttp

from helexa.bench.api_formats.rejected_parameters import RejectedParameters
from helexa.bench.client import Client, api_format_of
from helexa.bench.config import TargetSection
from helexa.bench.identity import Target
from helexa.bench.measurement.clock import Clock
from helexa.bench.targets.http import JsonCalls
from helexa.bench.targets.neuron import NeuronTarget
from helexa.bench.targets.openai import OpenAITarget
from helexa.bench.targets.target import TargetServer


@dataclass(frozen=True, slots=True)
class Connection:
    """A target (server to measure), and the objects that communicate with the target.

    Attributes:
        target: name, kind and address of the target.
        server: object that reads the target's build, hardware, models and accelerator readings.
        section: the target's entry in the configuration.
        session: HTTP session for all requests.
        rejected: optional request parameters that the target's models have rejected.
    """

    target: Target
    server: TargetServer
    section: TargetSection
    session: aiohttp.ClientSession
    rejected: RejectedParameters = field(default_factory=RejectedParameters)

    def client(self, timeout_secs: float, clock: Clock) -> Client:
        """Return a benchmark client that sends requests to the target.

        Args:
            timeout_secs: longest duration of a request, in seconds.
            clock: source of the current time.
        """
        return Client(
            self.session,
            self.section.endpoint,
            api_format_of(self.section.kind),
            clock,
            _bearer(self.section),
            timeout_secs,
            self.server.ignore_eos,
            self.rejected,
        )


def connect(section: TargetSection, session: aiohttp.ClientSession) -> Connection:
    """Create the connection of a configured target. No request is sent yet."""
    calls = JsonCalls(session, section.endpoint, api_format_of(section.kind).headers(_bearer(section)))
    server = NeuronTarget(calls) if section.kind == "neuron" else OpenAITarget(calls, section.kind)
    return Connection(Target(section.name, section.kind, section.endpoint, section.label), server, section, session)


def _bearer(section: TargetSection) -> str | None:
    return section.bearer.get_secret_value() if section.bearer else None
