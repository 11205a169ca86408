"""`helexa ps` and `helexa status`: the nodes of the fleet and their models."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from helexa.cli.flags_and_completion import AsJson, GatewayUrl
from helexa.cli.terminal_output_and_errors import note, printable
from helexa.cli.up_state_keys_and_logs import local_gateway
from helexa.core.display import memory_text, text_table
from helexa.core.node_reports import ModelInfo, ModelLoad, NodeReport

_HEADINGS = (
    *("MODEL", "NODE", "STATE", "SIZE", "SAVED", "DEVICE", "CONTEXT"),
    *("IN FLIGHT", "WAITING", "TOK/S", "DRAFTS", "UNLOADS"),
)


@dataclass(frozen=True)
class Row:
    """One row of the printed table: a model on a node, and its load.

    Unknown values are None.
    """

    model: str
    node: str
    state: str
    memory_mb: int | None = None  # memory of the model in MiB
    saved_prompts_mb: int | None = None  # size of the prompts on disk that the model can read, in MiB
    device: str | None = None  # device of the model, such as `cpu` or `cuda:0`
    ranks: int | None = None  # number of processes that compute the model together, or None if there is only one
    context: int | None = None
    in_flight: int | None = None
    waiting: int | None = None
    tok_s: float | None = None  # decode speed of one stream in tokens per second
    # Accepted share of the drafts of the draft model; None without a draft model, or before its first draft.
    draft_acceptance: float | None = None
    draft_gain: float | None = None  # estimated speed with the draft model divided by the speed without it
    unload_at: int | None = None  # when the model will be unloaded if it stays idle (Unix seconds); None for never

    def cells(self) -> tuple[str | int | float | None, ...]:
        """Return the cells of the printed table."""
        device = self.device if self.ranks is None else f"{self.device or '-'} x{self.ranks}"
        size = None if self.memory_mb is None else memory_text(self.memory_mb)
        saved = memory_text(self.saved_prompts_mb) if self.saved_prompts_mb else None
        unloads = None if self.unload_at is None else f"in {_duration(max(0.0, self.unload_at - time.time()))}"
        load = (self.context, self.in_flight, self.waiting, self.tok_s, self._drafts())
        return self.model, self.node, self.state, size, saved, device, *load, unloads

    def _drafts(self) -> str | None:
        if self.draft_gain is None:
            return None
        accepted = "" if self.draft_acceptance is None else f" ({self.draft_acceptance:.0%})"
        return f"{self.draft_gain:.2f}x{accepted}"


def ps(*, url: GatewayUrl = None, as_json: AsJson = False) -> None:
    """List the models of the fleet with their node, state and load.

    Args:
        as_json: Print JSON for programs.
    """
    nodes = local_gateway(url).node_reports()
    rows = [row for node in nodes for row in _rows(node)]
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    elif rows:
        print(text_table(_HEADINGS, [row.cells() for row in rows]))
    else:
        note("no node has loaded a model; load one with `helexa load MODEL`" if nodes else "the gateway has no nodes")


def _rows(node: NodeReport) -> Iterator[Row]:
    for info in node.models:
        load = node.load_of(info.id)
        yield Row(
            model=info.id,
            node=node.name,
            state=_state(node, info),
            memory_mb=info.vram_used_mb if info.granted_mb is None else info.granted_mb,
            saved_prompts_mb=load.saved_prompts_mb if load else None,
            device=_device(node, info),
            ranks=info.tensor_parallel,
            context=info.limit.context if info.limit else None,
            in_flight=load.in_flight if load else None,
            waiting=load.queue_depth if load else None,
            tok_s=load.tok_s_decode if load else None,
            draft_acceptance=_acceptance(load) if load else None,
            draft_gain=load.draft_gain or None if load else None,
            unload_at=None if (expiry := node.unload_at.get(info.id)) is None else round(expiry),
        )
    activation = node.activation
    held = {info.id for info in node.models}
    if activation.in_progress and activation.in_progress not in held:
        done = "" if activation.progress is None else f" {activation.progress:.0%}"
        yield Row(activation.in_progress, node.name, f"{activation.stage or 'loading'}{done}")
    for model in activation.pending:
        yield Row(model, node.name, "pending")
    for failed in activation.failed:
        yield Row(failed.model_id, node.name, "failed")


def _acceptance(load: ModelLoad) -> float | None:
    drafts = load.model_drafts_total
    return round(load.accepted_model_drafts_total / drafts, 3) if drafts else None


def _device(node: NodeReport, info: ModelInfo) -> str | None:
    if node.kind != "neuron" or node.discovery is None:
        return None
    if info.devices:
        return f"cuda:{','.join(map(str, info.devices))}"
    return None if node.discovery.devices else "cpu"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _state(node: NodeReport, info: ModelInfo) -> str:
    if not node.healthy:
        return "node down"
    if info.servable is not None and not info.servable.ok:
        return info.servable.reason or "unservable"
    return info.status


_VERDICTS = {
    "ok": "ready to serve",
    "impaired": "serving, but some models cannot answer",
    "degraded": "cannot serve: no node answers",
}


def status(*, url: GatewayUrl = None, as_json: AsJson = False) -> None:
    """Show the state of the gateway and its nodes in words.

    Args:
        as_json: Print JSON for programs: the gateway's health and its nodes.
    """
    gateway = local_gateway(url)
    health = gateway.get("/health")
    health_status = str(health.get("status")) if isinstance(health, dict) else "unknown"
    nodes = gateway.node_reports()
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
        free = "" if node.memory_free_mb is None else f"{memory_text(node.memory_free_mb)} free of "
        memory = f"{free}{memory_text(facts.memory_total_mb)}"
        return f"answers, no accelerator{reason}, {facts.cpu_cores} CPU cores, {memory} of memory"
    live = {device.index: device for device in node.devices}
    devices = [
        f"{device.name} with "
        + (f"{memory_text(live[device.index].vram_free_mb)} free of " if device.index in live else "")
        + memory_text(device.vram_total_mb)
        for device in facts.devices
    ]
    return f"answers, {', '.join(devices)}"
