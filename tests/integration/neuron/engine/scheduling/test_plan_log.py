"""Recorded plans replay identically, and the first plan that differs is reported."""

import asyncio
import stat
import sys
from collections import Counter
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest
from scheduler_runs import GREEDY
from virtual_hour import VirtualHour

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.scheduling import step_limits_and_fair_share
from helexa.neuron.engine.scheduling.queues import Queues
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine_client.client import EngineClient
from injection import inject
from plan_log import recorded_scheduler
from plan_log.recorded_scheduler import RecordedScheduler
from plan_log.records import Added, Failed, Finished, Planned, Setup, encode, read
from plan_log.replay import Replay, main, replay

GRAMMAR = '{"grammars": [{"lark_grammar": "start: \\"the sky is \\" (\\"blue\\" | \\"green\\") \\"!\\""}]}'


def setup(hybrid: bool = False, **options: object) -> Setup:
    engine_options = EngineOptions(**({"max_sequences": 16} | options))  # type: ignore[arg-type]
    return Setup(options=engine_options, pages=250, page_size=16, snapshots=8 if hybrid else None)


def record_plans(
    folder: Path, seconds: float, *, hybrid: bool = False, overlap: bool = False
) -> tuple[Path, VirtualHour]:
    scheduler = RecordedScheduler(setup(hybrid), folder)
    hour = VirtualHour(scheduler, seed=1, overlap=overlap)
    hour.run(seconds=seconds)
    assert scheduler.idle
    return scheduler.path, hour


@pytest.mark.parametrize(("hybrid", "overlap"), [(False, True), (True, False)], ids=["attention", "hybrid"])
def test_plan_log_of_a_simulated_hour_replays_identically(
    tmp_path: Path, hybrid: bool, overlap: bool, monkeypatch: pytest.MonkeyPatch
):
    preemptions = Counter[bool]()
    preempt = Queues.preempt

    def spy(self: Queues, sequence: object) -> None:
        preemptions[True] += 1
        preempt(self, sequence)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Queues, "preempt", spy)
        path, hour = record_plans(tmp_path, 3600, hybrid=hybrid, overlap=overlap)

    records = list(read(path))
    planned = [record for record in records if isinstance(record, Planned)]
    entries = [entry for record in planned for entry in record.entries]
    grammars = [grammar for record in records if isinstance(record, Finished) for grammar in record.grammars]
    coverage = {
        "requests": sum(isinstance(record, Added) for record in records) / 500,
        "plans": len(planned) / 5000,
        "drafts": sum(entry.guessed for entry in entries) / 500,
        "forced": sum(bool(entry.drafts) and not entry.guessed for entry in entries) / 100,
        "failed grammars": sum(grammar.failed for grammar in grammars) / 5,
        "complete grammars": sum(grammar.ended for grammar in grammars) / 50,
        "failed steps": sum(isinstance(record, Failed) for record in records) / 20,
        "not finite": sum(bool(record.not_finite) for record in records if isinstance(record, Finished)) / 5,
        "preemptions": preemptions[True] / 20,
    }
    if overlap:
        coverage["planned ahead"] = sum(record.ahead for record in planned) / 500
    if hybrid:
        coverage["snapshots"] = sum(entry.save is not None for entry in entries) / 500
        coverage["restored"] = sum(entry.restore is not None for entry in entries) / 20
    assert {name for name, share in coverage.items() if share < 1} == set(), coverage

    assert replay(path) == Replay(len(hour.plans))


def test_plan_log_contains_no_texts_and_no_account_names(tmp_path: Path):
    path, _ = record_plans(tmp_path / "new folder", 200)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = path.read_bytes()
    assert not any(word in content for word in (b"alice", b"bob", b"this text must not be in a log"))
    assert {record.request.salt for record in read(path) if isinstance(record, Added)} >= {"", "principal-1"}


@pytest.fixture(scope="module")
def quarter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, VirtualHour]:
    """The recorded plans of a quarter of an hour."""
    return record_plans(tmp_path_factory.mktemp("quarter"), 900)


@pytest.mark.parametrize(
    ("constant", "value"),
    [
        ("_MIXED_STRETCH", 1.9),
        ("_FAIR_STRETCH", 1.7),
        ("_FAIR_STEP_EVERY", 17),
        ("_MAX_MIXED_RUN", 31),
        ("_SHORT_SECONDS", 0.2),
        ("_MIN_HEAVY_TOKENS", 24),
    ],
)
def test_replay_with_a_changed_constant_stops_at_the_first_different_plan(
    quarter: tuple[Path, VirtualHour], monkeypatch: pytest.MonkeyPatch, constant: str, value: float
):
    path, hour = quarter
    monkeypatch.setattr(step_limits_and_fair_share, constant, value)
    result = replay(path)
    assert 1 < result.plans < len(hour.plans)
    assert result.recorded is not None
    assert result.recorded != result.replayed
    copied = copy_of(path, result.plans - 1)
    assert replay(copied) == Replay(result.plans - 1)
    # A scheduler with the changed constant, given the same requests, first differs at the same plan.
    changed = VirtualHour(Scheduler(*setup().arguments()), seed=1)
    changed.run(seconds=900)
    pairs = zip(hour.plans, changed.plans, strict=False)
    assert next(number for number, (before, after) in enumerate(pairs, start=1) if before != after) == result.plans


@pytest.mark.parametrize("number", [2, 300])
def test_replay_reports_a_plan_that_was_altered_in_the_log(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path, _ = record_plans(tmp_path, 200)
    assert output_of(path, monkeypatch, capsys).endswith(" plans are identical\n")
    altered = copy_of(path, number, alter=True)
    assert replay(altered).plans == number
    lines = output_of(altered, monkeypatch, capsys).splitlines()
    assert lines[0] == f"plan {number} differs"
    assert [line.partition(":")[0] for line in lines[1:]] == ["recorded", "replayed"]


def test_incomplete_last_plan_log_record_is_ignored_and_foreign_files_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path, _ = record_plans(tmp_path, 100)
    *_, last = read(path)
    assert isinstance(last, Planned)  # the empty plan of an idle scheduler
    content = path.read_bytes()
    path.write_bytes(content[:-3])
    assert replay(path) == Replay(sum(isinstance(record, Planned) for record in read(path)))
    for invalid in (b"", b"hello, world", content[len(content) // 2 :]):
        path.write_bytes(invalid)
        with pytest.raises(msgspec.DecodeError):
            replay(path)
    with pytest.raises(SystemExit, match="cannot be replayed"):
        output_of(path, monkeypatch, capsys)
    with pytest.raises(SystemExit, match="cannot be replayed"):
        output_of(tmp_path / "missing", monkeypatch, capsys)


def test_plan_log_ends_at_its_size_limit_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(recorded_scheduler, "_MAX_BYTES", 20_000)
    path, hour = record_plans(tmp_path, 100)
    assert 15_000 < path.stat().st_size < 20_000
    assert 10 < replay(path).plans < len(hour.plans)
    assert replay(path).recorded is None
    messages = [record.getMessage() for record in caplog.records]
    assert messages[1:] == [f"the plan log ends path={path} reason=it has reached 20000 bytes"]


def test_full_disk_ends_the_plan_log_but_not_the_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(recorded_scheduler.os, "O_EXCL", 0)
    monkeypatch.setattr(recorded_scheduler.time, "strftime", lambda format: "full")
    (tmp_path / f"full-{recorded_scheduler.os.getpid()}.plans").symlink_to("/dev/full")
    _, hour = record_plans(tmp_path, 100)
    assert {output.finish for output in hour.outputs.values()} >= {"stop", "length"}
    assert caplog.records[-1].getMessage().endswith("reason=No space left on device")


def test_step_plans_with_fixed_step_timing_do_not_depend_on_measured_times():
    plans: dict[str, list[object]] = {}
    for timing in ("measured", "fixed"):
        plans[timing] = []
        for noise_seed, token_seconds in ((1, 0.001), (2, 0.1)):
            arguments = setup(step_timing=timing).arguments()[:3]
            options = arguments[0]
            scheduler = Scheduler(*arguments, step_limits_and_fair_share.StepController(options, 120.0, token_seconds))
            hour = VirtualHour(scheduler, seed=3, noise_seed=noise_seed, overlap=True)
            hour.run(seconds=300)
            plans[timing].append(hour.plans)
    assert plans["fixed"][0] == plans["fixed"][1]
    assert plans["measured"][0] != plans["measured"][1]


@pytest.mark.parametrize(("overlap", "timing"), [(False, "measured"), (True, "fixed")])
async def test_plan_log_of_a_real_engine_replays_identically(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool, timing: str
):
    inject(monkeypatch, "error@token=1001,nan@token=1002", tmp_path)
    options = EngineOptions(kv_cache_mb=12, max_sequences=6, overlap=overlap, step_timing=timing)  # type: ignore[arg-type]
    client = await EngineClient.start(smollm2_gguf, options)

    async def complete(number: int, first: int = 1, **fields: object) -> None:
        prompt = [first] + [300 + number % 3] * (9 + number % 5) + list(range(400, 400 + 30 * (number % 5)))
        settings = {"max_tokens": 4 + number, "sampling": GREEDY, "salt": f"account-{number % 3}"} | fields
        async with aclosing(client.generate(prompt, **settings)) as outputs:  # type: ignore[arg-type]
            async for output in outputs:
                if number % 4 == 1 and output.tokens:
                    return  # the client disconnects

    try:
        await asyncio.gather(
            *(complete(number) for number in range(10)),
            *(complete(number, grammar=GRAMMAR, max_tokens=20) for number in range(2)),
            complete(8, prompt_logprobs=1, max_tokens=0),
            complete(3, first=1001),
            complete(3, first=1002),
            client.embed(list(range(500, 600))),
        )
    finally:
        await client.close()
    (path,) = tmp_path.iterdir()
    records = list(read(path))
    kinds = Counter(type(record) for record in records)
    assert kinds[Added] == 16
    assert kinds[Failed] > 0
    assert any(record.not_finite for record in records if isinstance(record, Finished))
    assert any(g.ended for record in records if isinstance(record, Finished) for g in record.grammars)
    assert any(record.ahead for record in records if isinstance(record, Planned)) == overlap
    assert replay(path) == Replay(kinds[Planned])
    assert b"account" not in path.read_bytes()


def copy_of(path: Path, plans: int, *, alter: bool = False) -> Path:
    """Copy a log up to plan number `plans` and return the path; `alter` changes the first entry of this plan."""
    copied, count = bytearray(), 0
    for record in read(path):
        if isinstance(record, Planned):
            count += 1
            if count == plans and alter:
                first = msgspec.structs.replace(record.entries[0], count=record.entries[0].count + 1)
                record = msgspec.structs.replace(record, entries=[first, *record.entries[1:]])
        copied += encode(record)
        if count == plans:
            break
    copy = path.with_name("copy")
    copy.write_bytes(copied)
    return copy


def output_of(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the output of the replay command."""
    monkeypatch.setattr(sys, "argv", ["replay", str(path)])
    try:
        main()
    except SystemExit as end:
        if end.code != 1:
            raise
    return capsys.readouterr().out
