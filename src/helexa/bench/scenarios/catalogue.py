"""Creates the scenarios that the configuration enables."""

from helexa.bench.config import ScenariosSection
from helexa.bench.measurement.measures import Objectives
from helexa.bench.scenarios.agentic import Agentic
from helexa.bench.scenarios.cancel import Cancel
from helexa.bench.scenarios.capability import Capability
from helexa.bench.scenarios.concurrency import Concurrency
from helexa.bench.scenarios.correctness import json_correctness, tool_correctness
from helexa.bench.scenarios.image import Image
from helexa.bench.scenarios.mixed import Mixed
from helexa.bench.scenarios.rate import Rate
from helexa.bench.scenarios.scenario import Scenario
from helexa.bench.scenarios.single import DecodeAtDepth, Single
from helexa.bench.scenarios.swap import Swap


def sweep_scenarios(config: ScenariosSection) -> list[Scenario]:
    """Return the enabled scenarios of a sweep, roughly in the order of their duration."""
    wanted = config.objectives
    objectives = Objectives(wanted.ttft_secs, wanted.tpot_secs, wanted.e2e_secs)
    answer, open_loop, agentic = config.max_tokens, config.open_loop, config.agentic
    scenarios: list[Scenario] = []
    for size in config.prompt_sizes:
        scenarios += [Single(size, answer, "cold"), Single(size, answer, "warm")]
    scenarios += [DecodeAtDepth(depth, answer) for depth in config.decode_depths]
    if config.cancel:
        scenarios.append(Cancel(min(config.prompt_sizes, default=128), answer))
    if config.tools:
        scenarios.append(tool_correctness())
    if config.json_schema:
        scenarios.append(json_correctness())
    scenarios += [
        Capability(probe.name, probe.prompt, probe.max_tokens, tuple(probe.expect))
        for probe in config.capability_probes
    ]
    scenarios += [Image(pixels) for pixels in config.image_sizes]
    if config.probe_prompt_tokens:
        scenarios.append(Mixed(config.probe_prompt_tokens, config.concurrency_secs, answer))
    scenarios += [
        Concurrency(level, config.concurrency_secs, config.concurrency_prompt_tokens, answer, objectives)
        for level in config.concurrency_levels
    ]
    if agentic.conversations:
        scenarios.append(
            Agentic(
                agentic.conversations,
                agentic.turns,
                agentic.system_tokens,
                agentic.tool_tokens,
                agentic.tool_secs,
                answer,
            )
        )
    scenarios += [
        Rate(rate, open_loop.arrivals, open_loop.duration_secs, open_loop.prompt_tokens, answer, objectives)
        for rate in sorted(open_loop.rates)
    ]
    return scenarios


def swap_scenario(config: ScenariosSection) -> Scenario:
    """Return the scenario of the subcommand `swap-cost`, which unloads and loads a model."""
    return Swap(min(config.prompt_sizes, default=128), config.max_tokens)
