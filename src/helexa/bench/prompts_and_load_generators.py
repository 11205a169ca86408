"""Prompts and load generators.

A closed loop keeps a fixed number of requests in flight. An open loop sends requests at fixed times.
"""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from helexa.bench.request_records_and_metrics import RequestRecord


@dataclass(frozen=True, slots=True)
class Turn:
    """A text message of a generated prompt's conversation."""

    role: Literal["system", "user", "assistant"]
    text: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a generated prompt lets the model call.

    `parameters` is a JSON Schema of its arguments.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A generated request for one streamed response."""

    model: str
    turns: Sequence[Turn]  # messages of the conversation
    max_tokens: int  # maximum number of tokens of the response
    # True if the request measures speed and the text of the response does not matter. A server that supports
    # `ignore_eos` then decodes exactly `max_tokens` tokens. The temperature is 1 if `fixed_length` is True, else 0. At
    # temperature 0, responses often repeat themselves. Speculative decoding of repetitions is several times as fast as
    # usual, so the measured speed would be too high.
    fixed_length: bool = False
    tools: Sequence[Tool] = ()  # functions that the model may call
    schema: Mapping[str, Any] | None = None  # JSON Schema of the response, or None

    @property
    def sampling(self) -> dict[str, float]:
        """The sampling parameters. Their names are the same in all API formats."""
        return {"temperature": 1, "top_p": 1} if self.fixed_length else {"temperature": 0}


# Common words: with a leading space, each is one token in current vocabularies.
_TEXT = """\
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power
hour game line end member law car city community name president team minute idea body information back parent face
others level office door health person art war history party result change morning reason research girl guy moment air
teacher force education"""
_WORDS = _TEXT.split()
_TASK = "\n\nContinue this list of words with as many further words as you can."
_TASK_TOKENS = 14


class Prompts:
    """Generates prompts of random words.

    A cold prompt begins with a unique word, so it cannot hit a prefix cache. A warm prompt begins with a given prefix.

    Args:
        seed: determines all words except the unique words. With the same seed, all builds receive prompts that differ
            only in the unique words.
        salt: determines the unique words. The salt should be random for each sample. Otherwise, measurements with a new
            database would repeat earlier prompts, which the server may still have in its prefix cache.
    """

    def __init__(self, seed: int, salt: str) -> None:
        self._random = random.Random(seed)
        self._nonces = random.Random(f"{seed}:{salt}")

    def cold(self, tokens: int) -> list[Turn]:
        """Return a prompt of about `tokens` tokens with a unique beginning."""
        return [Turn("user", f"{self._nonce()} {self.words(tokens - _TASK_TOKENS)}{_TASK}")]

    def warm(self, prefix: str, tokens: int = 0) -> list[Turn]:
        """Return a prompt of `prefix`, about `tokens` new tokens, and a task of 14 tokens."""
        return [Turn("user", f"{prefix} {self._nonce()} {self.words(tokens)}{_TASK}")]

    def prefix(self, tokens: int) -> str:
        """Return a unique prefix of about `tokens` - 14 tokens; `warm` adds a task of 14."""
        return f"{self._nonce()} {self.words(tokens - _TASK_TOKENS)}"

    def words(self, count: int) -> str:
        """Return a text of `count` random words, at least one."""
        return " ".join(self._random.choices(_WORDS, k=max(count, 1)))

    def _nonce(self) -> str:
        return "".join(self._nonces.choices("abcdefghijklmnopqrstuvwxyz", k=12))


def sample_seed(seed: int, *names: object) -> int:
    """Return the random seed of a sample's prompts, from `seed` and `names`."""
    return random.Random("\x00".join(map(str, (seed, *names)))).getrandbits(53)


class Clock:
    """A monotonic clock to measure durations, and a calendar clock to date samples.

    Tests pass another clock in place of this class.
    """

    def now(self) -> float:
        """Return the time in seconds on a monotonic clock with an arbitrary origin."""
        return time.perf_counter()

    def calendar_ms(self) -> int:
        """Return the calendar time in UTC epoch milliseconds."""
        return time.time_ns() // 1_000_000

    async def sleep_until(self, moment: float) -> None:
        """Wait until `now()` has reached `moment`, within the accuracy of the event loop."""
        await asyncio.sleep(max(moment - self.now(), 0))


Ask = Callable[[float | None], Awaitable[RequestRecord]]
"""Function that sends one request.

Its argument is the time at which the request is scheduled, or None.
"""
Arrivals = Literal["poisson", "constant"]
_MAX_IN_FLIGHT = 2048
_LOOK_AFTER = 20  # minimum number of values from which a trend is computed
_SURE = 3.3  # a slope above this number of standard errors counts as a trend; wrong in about 1 of 1000 tests
_SHED_SHARE = 0.05
_LATER = 1.5
_STUCK_SHARE = 0.2  # saturation: the number of requests in flight grows by more than this number per arrival
_PAUSE_AFTER_FAILURE_SECS = 0.25


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """The result of sending requests at fixed arrival times."""

    records: list[RequestRecord]  # records of the requests, in the order of their scheduled times
    # True if the server could not keep up: the number of requests in flight or the waiting times kept growing, or too
    # many requests were rejected
    saturated: bool


async def closed_loop(ask: Ask, concurrency: int, duration_secs: float, clock: Clock) -> list[RequestRecord]:
    """Keep `concurrency` requests in flight for `duration_secs`.

    Return their records, ordered by send time.

    Each simulated user sends at least one request, and waits for the response before it sends the next request. After
    `duration_secs`, users send no new requests. The function returns when the last response is complete.

    Args:
        ask: sends one request.
        concurrency: number of simulated users.
        duration_secs: seconds in which requests are sent.
        clock: source of the current time.
    """
    end = clock.now() + duration_secs
    records: list[RequestRecord] = []

    async def user() -> None:
        while True:
            record = await ask(None)
            records.append(record)
            if clock.now() >= end:
                return
            if record.status != "ok":  # do not flood a target that rejects at once
                await clock.sleep_until(clock.now() + _PAUSE_AFTER_FAILURE_SECS)

    async with asyncio.TaskGroup() as users:
        for _ in range(concurrency):
            users.create_task(user())
    return sorted(records, key=lambda record: record.sent)


def arrival_times(rate_rps: float, duration_secs: float, arrivals: Arrivals, seed: int) -> Iterator[float]:
    """Yield the send times of requests in ascending order, in seconds after the start.

    Args:
        rate_rps: average rate in requests per second.
        duration_secs: upper bound of the send times, in seconds.
        arrivals: `poisson` for random intervals, `constant` for equal intervals.
        seed: random seed of the intervals.
    """
    source = random.Random(seed)
    at = 0.0
    while at < duration_secs:
        yield at
        at += 1 / rate_rps if arrivals == "constant" else source.expovariate(rate_rps)


async def open_loop(ask: Ask, offsets: Sequence[float], clock: Clock) -> OpenLoop:
    """Send each request at its scheduled time, independent of earlier responses.

    Wait for all responses.

    If the number of requests in flight keeps growing or reaches 2048, the server is saturated, and no more requests are
    sent.

    Args:
        offsets: scheduled times in seconds after the start, ascending.
        clock: source of the current time.
    """
    start = clock.now()
    in_flight: set[asyncio.Task[RequestRecord]] = set()
    tasks: list[asyncio.Task[RequestRecord]] = []
    # Number of requests in flight at each arrival. Recorded from the first response on, because until then the
    # number always grows.
    backlog: list[int] = []
    saturated = False
    async with asyncio.TaskGroup() as requests:
        for offset in offsets:
            await clock.sleep_until(start + offset)
            if len(in_flight) < len(tasks):
                backlog.append(len(in_flight))
            saturated = len(in_flight) >= _MAX_IN_FLIGHT or _is_growing(backlog)
            if saturated:
                break
            task = requests.create_task(_sent(ask, start + offset))
            tasks.append(task)
            in_flight.add(task)
            task.add_done_callback(in_flight.discard)
    records = [task.result() for task in tasks]
    return OpenLoop(records, saturated or _fell_behind(records))


async def _sent(ask: Ask, scheduled: float) -> RequestRecord:
    return await ask(scheduled)


def _fell_behind(records: Sequence[RequestRecord]) -> bool:
    """Return whether the server could not keep up with an open loop.

    The function returns True if more than 5 % of the requests were rejected, timed out or incomplete, or if waiting
    times kept growing.
    """
    shed = sum(record.status in ("rejected", "timeout", "incomplete") for record in records)
    if shed > _SHED_SHARE * len(records):
        return True
    waits = [record.deltas[0].at - record.scheduled for record in records if record.deltas]
    if len(waits) < _LOOK_AFTER:
        return False
    first, second = np.array_split(np.asarray(waits), 2)
    later = bool(np.median(second) > _LATER * np.median(first))
    return later and _slope_is_sure(waits) and _slope_is_sure(second.tolist())


def _is_growing(backlog: Sequence[int]) -> bool:
    """Return whether the number of requests in flight keeps growing.

    The number must grow significantly in each third of the series. In the last third, it must grow by more than 0.2
    requests per arrival. These conditions exclude a server that only paused for a moment. With fewer than 40 numbers,
    the result is False.

    Args:
        backlog: number of requests in flight at each arrival.
    """
    if len(backlog) < 2 * _LOOK_AFTER:
        return False
    thirds = [third.tolist() for third in np.array_split(np.asarray(backlog), 3)]
    return all(map(_slope_is_sure, thirds)) and _slope(thirds[-1])[0] > _STUCK_SHARE


def _slope_is_sure(series: Sequence[float]) -> bool:
    slope, error = _slope(series)
    return slope > _SURE * error


def _slope(series: Sequence[float]) -> tuple[float, float]:
    """Return slope and standard error of the least-squares line through `series`."""
    y = np.asarray(series, dtype=np.float64)
    x = np.arange(y.size) - (y.size - 1) / 2
    spread = float(x @ x)
    slope = float(x @ y) / spread
    residuals = y - y.mean() - slope * x
    return slope, math.sqrt(float(residuals @ residuals) / (y.size - 2) / spread)
