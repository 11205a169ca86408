"""`helexa ps`: list the models on all nodes of a gateway, and their load."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated

from cyclopts import Parameter

from helexa.cli.gateway import Gateway
from helexa.cli.nodes import NodeReport, node_reports
from helexa.cli.terminal import note
from helexa.core.fleet import ModelInfo
from helexa.core.text_table import text_table

_HEADINGS = ("MODEL", "NODE", "STATE", "RANKS", "CONTEXT", "IN FLIGHT", "WAITING", "TOK/S")


@dataclass(frozen=True)
class Row:
    """One row of the printed table: a model on a node, and its load.

    Unknown values are None. `ranks` is None for a model that one process computes. `tok_s` is the decode speed of one
    stream in tokens per second.
    """

    model: str
    node: str
    state: str
    ranks: int | None = None
    context: int | None = None
    in_flight: int | None = None
    waiting: int | None = None
    tok_s: float | None = None


def ps(*, url: str | None = None, as_json: Annotated[bool, Parameter(name="--json", negative="")] = False) -> None:
    """List the models of the fleet with their node, state and load.

    Args:
        url: Gateway to ask, else HELEXA_BASE_URL, else http://127.0.0.1:31313.
        as_json: Print JSON for programs.
    """
    nodes = node_reports(Gateway.from_environment(url))
    rows = [row for node in nodes for row in _rows(node)]
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    elif rows:
        print(text_table(_HEADINGS, [tuple(asdict(row).values()) for row in rows]))
    else:
        note("no node holds a model" if nodes else "the gateway has no nodes")


def _rows(node: NodeReport) -> Iterator[Row]:
    for info in node.models:
        load = node.load_of(info.id)
        yield Row(
            model=info.id,
            node=node.name,
            state=_state(node, info),
            ranks=info.tensor_parallel,
            context=info.limit.context if info.limit else None,
            in_flight=load.in_flight if load else None,
            waiting=load.queue_depth if load else None,
            tok_s=load.tok_s_decode if load else None,
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


def _state(node: NodeReport, info: ModelInfo) -> str:
    if not node.healthy:
        return "node down"
    if info.servable is not None and not info.servable.ok:
        return info.servable.reason or "unservable"
    return info.status
