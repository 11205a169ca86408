"""Hooks for engine processes: injected faults, plan logs, and a faster interpreter of Triton.

Tests and soak tests put this folder on PYTHONPATH (see `injection`). Python imports this module when it starts. In an
engine process, the module patches functions of the engine as soon as their modules are imported.
"""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from injection import FAULTS, PLAN_LOG

_STAGE = "helexa.neuron.engine.stage_process"
_PROCESSES = ("helexa.neuron.engine.process", "helexa.neuron.engine.rank_process", _STAGE)


class _Hooks(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        patch = _PATCHES.pop(fullname, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Current:
    """The faults of this process, and its rank if it computes a stage of another host's model."""

    faults: Any = None
    stage_rank = 0


def _faults(model: Path, rank: int = 0) -> Any:
    from debug_fault import Faults

    _Current.faults = Faults.from_environment(model, os.environ, rank)
    return _Current.faults


def _with_faults(on_progress: Callable[..., None], faults: Any) -> Callable[..., None]:
    def progress(*numbers: int) -> None:
        faults.loading()
        on_progress(*numbers)

    return progress


def _patch_load(module: Any) -> None:
    load = module.load

    def wrapped(model: Path, options: Any, on_progress: Any, *rest: Any) -> Any:
        faults = _faults(model)
        runner = load(model, options, _with_faults(on_progress, faults), *rest)
        faults.afflict(runner)
        return runner

    module.load = wrapped


def _patch_build(module: Any) -> None:
    build_rank, build_part = module.build_rank, module.build_part

    def rank_of_host(message: Any, on_progress: Any) -> Any:
        return build_rank(message, _with_faults(on_progress, _faults(Path(message.model), message.rank)))

    def part(build: Any, other_ranks: Any, on_progress: Any) -> Any:
        return build_part(build, other_ranks, _with_faults(on_progress, _faults(build.path, _Current.stage_rank)))

    module.build_rank = rank_of_host
    if _STAGE in sys.orig_argv:  # in an engine process, `load` has the faults of rank 0
        module.build_part = part


def _patch_rank(module: Any) -> None:
    allocate = module.Rank._allocate

    def wrapped(self: Any, message: Any) -> Any:
        reply = allocate(self, message)
        if _Current.faults is not None:
            _Current.faults.afflict(self._runner)
        return reply

    module.Rank._allocate = wrapped


def _patch_channel(module: Any) -> None:
    receive = module.Channel.receive

    def wrapped(self: Any, kind: Any) -> Any:
        message = receive(self, kind)
        if type(message).__name__ == "OpenStage":
            _Current.stage_rank = message.stage * message.options.tensor_parallel
        return message

    module.Channel.receive = wrapped


def _patch_loop(module: Any) -> None:
    from plan_log.recorded_scheduler import RecordedScheduler
    from plan_log.records import Setup

    made: dict[str, tuple[Any, ...]] = {}

    def recording(name: str) -> Callable[..., Any]:
        construct = getattr(module, name)

        def constructed(*arguments: Any) -> Any:
            made[name] = arguments
            return construct(*arguments)

        return constructed

    for name in ("PagePool", "StatePool", "StepController"):
        setattr(module, name, recording(name))

    def scheduler(
        options: Any, _pages: Any, states: Any, _controller: Any, image_traits: Any, window: Any, drafts: Any
    ) -> Any:
        assert drafts is None, "a plan log has no drafts of a draft model"
        pages, page_size, *_ = made["PagePool"]
        _, step_seconds, token_seconds = made["StepController"]
        setup = Setup(
            options=options,
            pages=pages,
            page_size=page_size,
            snapshots=None if states is None else made["StatePool"][1],
            step_seconds=step_seconds,
            token_seconds=token_seconds,
            image_traits=image_traits,
            window=window,
        )
        return RecordedScheduler(setup, Path(os.environ[PLAN_LOG]))

    module.Scheduler = scheduler


def _patch_interpreter(module: Any) -> None:
    import triton_interpreter  # noqa: F401


_PATCHES: dict[str, Callable[[Any], None]] = {}
if any(name in sys.orig_argv for name in _PROCESSES):
    _PATCHES["triton.runtime.interpreter"] = _patch_interpreter
    if FAULTS in os.environ:
        _PATCHES |= {
            "helexa.neuron.engine.loading.load": _patch_load,
            "helexa.neuron.engine.loading.build": _patch_build,
            "helexa.neuron.engine.ranks.rank": _patch_rank,
            "helexa.neuron.engine.ipc.host_channel": _patch_channel,
        }
    if PLAN_LOG in os.environ:
        _PATCHES["helexa.neuron.engine.loop"] = _patch_loop
    sys.meta_path.insert(0, _Hooks())
