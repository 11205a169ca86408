"""Grammars in a real engine process, and their compilation, with SmolLM2's vocabulary."""

import asyncio
import gc
import json
import random
import select
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio
from llguidance import LLMatcher
from scheduler_runs import GREEDY

from helexa.neuron.engine.grammar_matcher import GrammarMatcher
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams, TokenOutput
from helexa.neuron.engine.scheduling.grammar_compiler import GrammarFailure, Grammars
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine_client.client import EngineClient
from helexa.neuron.grammar.grammar_check_and_rejection import PARSER_LIMITS
from helexa.neuron.text.model_text import ModelText
from helexa.neuron.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
JSON = LLMatcher.grammar_from_json_schema(SCHEMA, {"whitespace_flexible": False})
SLOW = LLMatcher.grammar_from_json_schema({"enum": [f"{'x' * 50}{n}" for n in range(20000)]})


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf: Path) -> Tokenizer:
    return ModelText.open(smollm2_gguf).tokenizer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(smollm2_gguf: Path) -> AsyncIterator[EngineClient]:
    client = await EngineClient.start(smollm2_gguf, EngineOptions(kv_cache_mb=64))
    yield client
    await client.close()


async def complete(
    client: EngineClient,
    tokenizer: Tokenizer,
    grammar: str,
    sampling: SamplingParams = GREEDY,
    max_tokens: int = 80,
) -> tuple[str, TokenOutput]:
    prompt = tokenizer.encode("Tell me of Paris, as JSON:")
    stream = client.generate(
        prompt,
        max_tokens=max_tokens,
        sampling=sampling,
        stop_ids=sorted(tokenizer.eos_ids),
        grammar=grammar,
    )
    async with aclosing(stream):
        outputs = [output async for output in stream]
    return tokenizer.decode(token for output in outputs for token in output.tokens), outputs[-1]


@pytest.mark.asyncio(loop_scope="module")
async def test_concurrent_requests_with_different_grammars_follow_their_own_grammar(
    client: EngineClient, tokenizer: Tokenizer
) -> None:
    hot = [SamplingParams(temperature=1, seed=seed, top_p=0.95) for seed in range(6)]
    from_schema, (digits, _), (free, _) = await asyncio.gather(
        asyncio.gather(*(complete(client, tokenizer, JSON, sampling) for sampling in hot)),
        complete(client, tokenizer, LLMatcher.grammar_from_regex("[0-9]{4}")),
        complete(client, tokenizer, "", max_tokens=8),
    )
    for text, last in from_schema:
        if last.finish == "stop":
            jsonschema.validate(json.loads(text), SCHEMA)
    assert sum(last.finish == "stop" for _, last in from_schema) >= 4
    assert len(digits) == 4
    assert digits.isdigit()
    assert free == (await complete(client, tokenizer, "", max_tokens=8))[0]


@pytest.mark.asyncio(loop_scope="module")
async def test_invalid_grammar_fails_only_its_request(client: EngineClient, tokenizer: Tokenizer) -> None:
    bad = json.dumps({"grammars": [{"json_schema": {"type": "poem"}}]})
    (_, failed), (text, last), (_, garbled) = await asyncio.gather(
        complete(client, tokenizer, bad), complete(client, tokenizer, JSON), complete(client, tokenizer, "start: (")
    )
    assert (failed.finish, failed.retry, failed.bad_grammar) == ("error", False, True)
    assert "cannot be compiled" in (failed.error or "")
    assert "poem" in (failed.error or "")
    assert garbled.finish == "error"
    assert "\n" not in (garbled.error or "")
    assert last.finish == "stop"
    jsonschema.validate(json.loads(text), SCHEMA)
    assert client.open_streams == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_request_canceled_during_its_grammar_compilation_frees_its_pages(
    client: EngineClient, tokenizer: Tokenizer
) -> None:
    tasks = [asyncio.create_task(complete(client, tokenizer, SLOW)) for _ in range(3)]
    while client.open_streams < 3:  # noqa: ASYNC110
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await complete(client, tokenizer, JSON)  # waits for the running compilation, which is not interrupted
    assert (client.running, client.waiting, client.open_streams) == (0, 0, 0)
    assert client.free_pages == client.ready.kv_pages


def sequence(number: int, grammar: str) -> Sequence:
    return Sequence(Generate(id=number, prompt=[1], max_tokens=9, sampling=GREEDY, grammar=grammar))


def fetched(grammars: Grammars, count: int) -> list[tuple[int, GrammarFailure | None]]:
    """Return ids and failures of the next `count` compiled sequences, in order of completion."""
    compiled: list[tuple[int, GrammarFailure | None]] = []
    while len(compiled) < count:
        assert select.select([grammars], [], [], 60)[0]
        compiled += [(sequence.id, failure) for sequence, failure in grammars.fetch()]
    return compiled


def test_grammar_matcher_that_hits_a_parser_limit_does_not_fail_later_matchers(
    smollm2_gguf: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PARSER_LIMITS, "max_lexer_states", 500)
    states = LLMatcher.grammar_from_regex("([abc]*a[abc]{20}d)[abc]*")
    *letters, forbidden = (tokenizer.encode(letter)[0] for letter in "abcz")

    def guide_of(number: int) -> GrammarMatcher:
        new = sequence(number, states)
        grammars.begin(new)
        assert fetched(grammars, 1) == [(number, None)]
        assert new.matcher is not None
        return new.matcher

    with closing(Grammars(smollm2_gguf, 49152)) as grammars:
        exhausted, draw = guide_of(0), random.Random(1)
        for _ in range(500):
            exhausted.advance(draw.choice(letters))
            exhausted.rejection_masks((forbidden,), ())
        assert "too many states" in exhausted.error
        later = guide_of(1)
        for letter in letters:
            later.advance(letter)
            assert later.rejection_masks((forbidden,), ())
        assert later.error == ""


class Panic(BaseException):
    """Like PyO3's exception for a Rust panic, not an `Exception`."""


def test_panic_of_the_grammar_compiler_fails_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(model: Path, width: int) -> Any:
        raise Panic

    monkeypatch.setattr("helexa.neuron.engine.grammar_matcher.read_vocabulary", panic)
    with closing(Grammars(Path("no model"), 10)) as grammars:
        for number in range(2):
            grammars.begin(sequence(number, JSON))
            ((number_of_failed, failure),) = fetched(grammars, 1)
            assert number_of_failed == number
            assert failure is not None
            assert not failure.bad_grammar


class PausedCompiler:
    """Compiles grammars; the compilation of `grammar` waits for `resume`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, grammar: str) -> None:
        self.started = threading.Event()
        self.resume = threading.Event()

        def compile(tokenizer: Any, source: str, **limits: Any) -> LLMatcher:
            if source == grammar:
                self.started.set()
                self.resume.wait()
            return LLMatcher(tokenizer, source, **limits)

        monkeypatch.setattr("llguidance.LLMatcher", compile)


def test_request_with_a_cached_grammar_does_not_wait_for_a_running_compilation(
    smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = PausedCompiler(monkeypatch, SLOW)
    with closing(Grammars(smollm2_gguf, 49152)) as grammars:
        grammars.begin(sequence(0, JSON))
        assert fetched(grammars, 1) == [(0, None)]
        for number, grammar in enumerate([SLOW, LLMatcher.grammar_from_regex("[a-z]"), JSON], 1):
            grammars.begin(sequence(number, grammar))
            compiler.started.wait()
        compiler.resume.set()
        assert [number for number, _ in fetched(grammars, 3)] == [1, 3, 2]


def test_canceled_sequence_is_released_before_the_compilation_of_its_grammar_ends(
    smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = PausedCompiler(monkeypatch, SLOW)
    with closing(Grammars(smollm2_gguf, 49152)) as grammars:
        grammars.begin(sequence(0, SLOW))
        compiler.started.wait()
        waiting = sequence(1, "another grammar")
        reference = weakref.ref(waiting)
        grammars.begin(waiting)
        del waiting
        grammars.cancel(1)
        gc.collect()
        assert reference() is None
        compiler.resume.set()
        assert fetched(grammars, 1) == [(0, None)]
