"""`helexa status`: print the state of the gateway and its nodes as sentences."""

import json
from collections.abc import Iterator
from typing import Annotated

from cyclopts import Parameter

from helexa.cli.gateway import Gateway
from helexa.cli.nodes import NodeReport, node_reports
from helexa.cli.terminal import printable

_VERDICTS = {
    "ok": "ready to serve",
    "impaired": "serving, but some models cannot answer",
    "degraded": "cannot serve: no node answers",
}


def status(*, url: str | None = None, as_json: Annotated[bool, Parameter(name="--json", negative="")] = False) -> None:
    """Show the state of the gateway and its nodes in words.

    Args:
        url: Gateway to ask, else HELEXA_BASE_URL, else http://127.0.0.1:31313.
        as_json: Print JSON for programs: the gateway's health and its nodes.
    """
    gateway = Gateway.from_environment(url)
    health = gateway.get("/health")
    health_status = str(health.get("status")) if isinstance(health, dict) else "unknown"
    nodes = node_reports(gateway)
    if as_json:
        print(json.dumps({"health": health, "nodes": [node.json_dict() for node in nodes]}, indent=2))
        return
    healthy = sum(node.healthy for node in nodes)
    verdict = _VERDICTS.get(health_status, health_status)
    print(printable(f"gateway {gateway.url}: {verdict}; {healthy} of {len(nodes)} nodes answer"))
    for node in nodes:
        for line in _describe(node):
            print(printable(line))


def _describe(node: NodeReport) -> Iterator[str]:
    yield f"\n{node.name} ({node.endpoint}): {_machine(node) if node.healthy else 'does not answer'}"
    if not node.healthy:
        yield from (f"  {info.id}: out of reach" for info in node.models)
        return
    for info in node.models:
        load = node.load_of(info.id)
        state = info.status if info.tensor_parallel is None else f"{info.status} on {info.tensor_parallel} ranks"
        if info.servable is not None and not info.servable.ok:
            yield f"  {info.id}: cannot answer ({info.servable.detail or info.servable.reason or 'no reason given'})"
        elif load is not None and (load.in_flight or load.queue_depth):
            yield f"  {info.id}: {state}, answering {load.in_flight}, {load.queue_depth} waiting"
        else:
            yield f"  {info.id}: {state}, idle"
    activation = node.activation
    if activation.in_progress:
        done = "" if activation.progress is None else f", {activation.progress:.0%} done"
        yield f"  {activation.in_progress}: {activation.stage or 'loading'}{done}"
    for model in activation.pending:
        yield f"  {model}: waits to be loaded"
    for failed in activation.failed:
        yield f"  {failed.model_id}: could not be loaded: {' '.join(failed.error.split())}"


def _machine(node: NodeReport) -> str:
    facts = node.discovery
    if facts is None:
        return "answers"
    if not facts.devices:
        reason = f" ({facts.cuda_unavailable_reason})" if facts.cuda_unavailable_reason else ""
        return f"answers, no accelerator{reason}, {facts.cpu_cores} CPU cores, {_gib(facts.memory_total_mb)} of memory"
    live = {device.index: device for device in node.devices}
    devices = [
        f"{device.name} with "
        + (f"{_gib(live[device.index].vram_free_mb)} free of " if device.index in live else "")
        + _gib(device.vram_total_mb)
        for device in facts.devices
    ]
    return f"answers, {', '.join(devices)}"


def _gib(mebibytes: int) -> str:
    return f"{mebibytes / 1024:.1f} GiB"
