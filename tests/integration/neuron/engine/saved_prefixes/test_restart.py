"""Prompts on disk: an engine that reads them answers as one that computed them.

Each engine is a process of its own.
"""

import asyncio
import itertools
import os
import random
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helexa.neuron.cache_folder import cache_root, saved_prompts
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import CachedPrefixes, PrefixMiss, SamplingParams
from helexa.neuron.engine.prefix_disk import _records, namespace
from helexa.neuron.engine_client.client import EngineClient
from helexa.neuron.ops.native.kernel_library import native_kernels
from http_listener import eventually
from nightly import NIGHTLY, cases, daily
from tiny_models import tiny_model

LONG = [(900 + 7 * number) % 300 for number in range(400)]
PAGES = len(LONG) // 64
GREEDY = SamplingParams(temperature=0)
HYBRID = {
    "model_type": "qwen3_5_text",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 512,
}
WINDOWS = HYBRID | {
    "model_type": "gemma3_text",
    "sliding_window": 100,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}

MIXED = {
    "model_type": "gemma3_text",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 100,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 512,
}

MIXTURE = {
    "model_type": "qwen3_moe",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
WIDE = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 1024,
}
LIMIT_MB = 100  # a segment has 64 MiB
SMALL = {"snapshot_mb": 8, "kv_cache_mb": 32}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the saved prompts of the engines that a test starts."""
    native_kernels()  # compiles the kernels, unless they are in the cache
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/kernels").symlink_to(cache_root(None) / "kernels")
    monkeypatch.setenv("HELEXA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/prompts"


@asynccontextmanager
async def engine(model: Path, **options: Any) -> AsyncIterator[EngineClient]:
    settings: dict[str, Any] = {"kv_cache_mb": 64, "prefix_disk_mb": 1024, "max_sequences": 4} | options
    client = await EngineClient.start(model, EngineOptions(**settings))
    try:
        yield client
    finally:
        await client.close()


async def answer(
    client: EngineClient, prompt: list[int] = LONG, salt: str = "a", prefix_key: str = ""
) -> tuple[list[int], int]:
    """Return the greedy tokens after a prompt, and the number of tokens of the prompt that were not computed."""
    async with asyncio.timeout(600 if NIGHTLY else 60):
        stream = client.generate(prompt, max_tokens=8, sampling=GREEDY, salt=salt, prefix_key=prefix_key)
        outputs = [output async for output in stream]
    assert outputs[-1].error is None
    return [token for output in outputs for token in output.tokens], max(output.cached_tokens for output in outputs)


def saved(folder: Path) -> int:
    """Return the number of records on disk."""
    return sum(len(_records(segment)) for segment in segments(folder))


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.segment"))


@pytest.mark.parametrize("kv_dtype", daily(["int8"], ["unquantized", "int8"]))
async def test_prompt_is_read_from_disk_and_not_computed_again_after_a_restart(
    folder: Path, smollm2_gguf: Path, kv_dtype: str
) -> None:
    async with engine(smollm2_gguf, kv_dtype=kv_dtype) as client:
        computed = await answer(client)
        assert computed[1] == 0
    async with engine(smollm2_gguf, kv_dtype=kv_dtype) as client:
        assert await answer(client) == (computed[0], PAGES * 64)
        assert client.disk.tokens == PAGES * 64
        tokens, cached = await answer(client, LONG[:200])
        assert (tokens, 0) == await answer(client, LONG[:200], salt="b") and cached == 192


async def test_saved_prompts_are_not_shared_across_principals_options_or_model_files(
    folder: Path, tiny_gguf: Path, tmp_path: Path
) -> None:
    async with engine(tiny_gguf) as client:
        await answer(client)
    async with engine(tiny_gguf) as client:
        assert (await answer(client, salt="b"))[1] == 0
    async with engine(tiny_gguf, kv_dtype="int8") as client:
        assert (await answer(client))[1] == 0
    copy = shutil.copyfile(tiny_gguf, tmp_path / tiny_gguf.name)
    os.truncate(copy, copy.stat().st_size)
    async with engine(copy) as client:
        assert (await answer(client))[1] == 0


def test_saved_prompts_with_images_are_not_shared_with_another_vision_tower(tmp_path: Path) -> None:
    model, tower = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    model.write_bytes(b"model")

    def namespaces(content: bytes) -> list[str]:
        tower.write_bytes(content)
        runner: Any = SimpleNamespace(page_parts=[8], window_parts=[], state_parts=[])
        runner.ops = SimpleNamespace(name="native", kv_bits=8)
        return [namespace(model, EngineOptions(images=images), runner) for images in (False, True)]

    (text, images), (other_text, other_images) = namespaces(b"tower"), namespaces(b"other")
    assert text == other_text
    assert images != other_images


@pytest.mark.parametrize(
    ("shape", "options"),
    daily(
        [(HYBRID, {}), (HYBRID, {"tensor_parallel": 2}), (WINDOWS, {"kernels": "torch"})],
        [
            (shape, options)
            for shape in (HYBRID, WINDOWS, MIXTURE)
            for options in ({}, {"tensor_parallel": 2}, {"kernels": "torch"}, {"kernels": "triton"})
        ],
        several=True,
    ),
)
async def test_caches_of_every_architecture_and_kernel_are_restored_from_disk(
    folder: Path, tmp_path: Path, shape: dict[str, Any], options: dict[str, Any]
) -> None:
    tiny_model(tmp_path / "tiny", **shape)
    prompt = LONG[:140] if "triton" in options.values() else LONG  # the interpreter computes two tokens a second
    async with engine(tmp_path / "tiny", snapshot_mb=8, kv_cache_mb=16, **options) as client:
        computed = await answer(client, prompt)
    async with engine(tmp_path / "tiny", snapshot_mb=8, kv_cache_mb=16, **options) as client:
        assert await answer(client, prompt) == (computed[0], len(prompt) // 64 * 64)
        assert client.disk.tokens == len(prompt) // 64 * 64


async def test_window_pages_of_a_mixed_model_are_restored_from_disk_with_its_kv_pages(
    folder: Path, tmp_path: Path
) -> None:
    """The layers with a window have fewer pages than the other layers, so their parts are records of their own."""
    tiny_model(tmp_path / "mixed", **MIXED)
    async with engine(tmp_path / "mixed", kv_cache_mb=16) as client:
        computed = await answer(client)
    async with engine(tmp_path / "mixed", kv_cache_mb=16) as client:
        assert await answer(client) == (computed[0], PAGES * 64)
        assert client.disk.tokens == PAGES * 64


async def test_beginning_of_a_prompt_larger_than_the_disk_limit_is_saved(folder: Path, tmp_path: Path) -> None:
    """The pages of the prompt have 75 MB, more than a segment, and two segments are over the limit."""
    tiny_model(tmp_path / "wide", **WIDE)
    prompt = [*LONG, *LONG[:200]]
    options = {"kv_cache_mb": 320, "prefix_disk_mb": LIMIT_MB}
    async with engine(tmp_path / "wide", **options) as client:
        computed = await answer(client, prompt)
        await eventually(lambda: saved(folder) >= 2)
    async with engine(tmp_path / "wide", **options) as client:
        tokens, cached = await answer(client, prompt)
        assert tokens == computed[0]
        assert 0 < cached < 600 // 64 * 64


async def test_killed_engine_leaves_saved_prompts_that_the_next_engine_can_read(folder: Path, tiny_gguf: Path) -> None:
    async with engine(tiny_gguf) as client:
        computed = await answer(client)
        await eventually(lambda: saved(folder) >= PAGES)
        client._child.signal(signal.SIGKILL)
    torn = segments(folder)[0]
    os.truncate(torn, torn.stat().st_size - 1000)
    async with engine(tiny_gguf) as client:
        tokens, cached = await answer(client)
        assert tokens == computed[0]
        assert 0 < cached < PAGES * 64


def flip(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[len(contents) * 3 // 5] ^= 1
    path.write_bytes(contents)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def overwrite(path: Path) -> None:
    path.write_bytes(bytes(4096))


@pytest.mark.parametrize("damage", daily([flip], [flip, Path.unlink, empty, overwrite]))
async def test_damaged_segment_files_change_no_answer(
    folder: Path, tiny_gguf: Path, damage: Callable[[Path], Any]
) -> None:
    async with engine(tiny_gguf) as client:
        computed = await answer(client)
    async with engine(tiny_gguf) as client:
        assert (await answer(client, LONG[:140]))[1] == 128  # the records are known before the damage
        for segment in segments(folder):
            damage(segment)
        tokens, cached = await answer(client)
        assert tokens == computed[0]
        assert cached < PAGES * 64


async def test_engine_reports_which_prefix_keys_are_cached_in_memory_and_on_disk(folder: Path, tiny_gguf: Path) -> None:
    first, second = "0123456789abcdef", "00000000000000ff"
    async with engine(tiny_gguf) as client:
        await answer(client, LONG * 2, prefix_key=first)
        await answer(client, LONG, prefix_key=second)  # too short to matter
        assert client.prefixes == CachedPrefixes(memory=[first])
        await eventually(lambda: saved(folder) >= 2 * PAGES + 1)  # before pages of another prompt count, too
        changed = client.generate([*(LONG * 2)[:49], 7, *(LONG * 2)[50:]], max_tokens=1, sampling=GREEDY, salt="a")
        assert [output async for output in changed] and changed.miss == PrefixMiss(position=49, reason="changed")
    async with engine(tiny_gguf) as client:
        await eventually(lambda: client.prefixes == CachedPrefixes(disk=[first]))  # an idle engine looks, too
        await answer(client, LONG * 2 + [7] * 600, prefix_key=second)
        assert client.prefixes == CachedPrefixes(memory=[first, second])
        await client.clear_prefixes()
        assert client.prefixes == CachedPrefixes()


async def test_prompts_cleared_from_the_cache_are_computed_and_saved_again(folder: Path, smollm2_gguf: Path) -> None:
    async with engine(smollm2_gguf, model_id="org/small") as client:
        computed = await answer(client)
        await eventually(lambda: saved(folder) >= PAGES)
        await eventually(lambda: client.disk.size >= PAGES * 64 * 1000)  # although the engine is idle
        assert [(entry.models, entry.files) for entry in saved_prompts()] == [(("org/small",), segments(folder))]
        running = client.generate(LONG[:200], max_tokens=100, sampling=GREEDY, salt="b")
        first = await anext(running)
        await client.clear_prefixes()
        await eventually(lambda: not saved(folder))
        assert await answer(client) == (computed[0], 0)
        assert [token async for output in running for token in output.tokens] and first.tokens
        await eventually(lambda: saved(folder) >= PAGES)
    async with engine(smollm2_gguf) as client:
        assert await answer(client) == (computed[0], PAGES * 64)


async def test_cleared_state_snapshots_are_computed_again(folder: Path, tmp_path: Path) -> None:
    tiny_model(tmp_path / "hybrid", **HYBRID)
    async with engine(tmp_path / "hybrid", snapshot_mb=8, kv_cache_mb=16, prefix_disk_mb=0) as client:
        computed = await answer(client)
        assert (await answer(client))[1] == PAGES * 64
        await client.clear_prefixes()
        assert await answer(client) == (computed[0], 0)


async def test_two_concurrent_engines_can_save_prompts_into_one_folder(folder: Path, tiny_gguf: Path) -> None:
    async with engine(tiny_gguf) as first, engine(tiny_gguf) as second:
        computed = await asyncio.gather(answer(first), answer(second))
        assert computed[0][0] == computed[1][0]  # a slow engine may read what the other one has saved
    async with engine(tiny_gguf) as client:
        assert await answer(client) == (computed[0][0], PAGES * 64)


async def test_requests_are_answered_if_the_folder_for_saved_prompts_is_unwritable(
    folder: Path, tiny_gguf: Path
) -> None:
    folder.write_text("a file in place of the folder")
    async with engine(tiny_gguf) as client:
        assert await answer(client) == await answer(client, salt="b")
        assert (await answer(client))[1] == PAGES * 64  # from memory


async def test_request_that_waits_for_pages_from_disk_can_be_canceled(folder: Path, tiny_gguf: Path) -> None:
    async with engine(tiny_gguf) as client:
        computed = await answer(client)
    async with engine(tiny_gguf) as client:
        for _ in range(5):
            stream = client.generate(LONG, max_tokens=8, sampling=GREEDY, salt="a")
            task = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await stream.aclose()
        assert (await answer(client))[0] == computed[0]


async def test_other_sequences_advance_while_pages_are_read_from_disk(folder: Path, tiny_gguf: Path) -> None:
    others = [[(5 + 3 * number) % 200 for number in range(20 + n)] for n in range(3)]
    async with engine(tiny_gguf) as client:
        expected = [(await answer(client, prompt))[0] for prompt in (LONG, *others)]
    async with engine(tiny_gguf) as client:
        answers = await asyncio.gather(*(answer(client, prompt) for prompt in (*others, LONG)))
        assert [tokens for tokens, _ in answers] == [*expected[1:], expected[0]]
        assert answers[-1][1] == PAGES * 64


async def test_answers_stay_equal_if_engines_that_share_a_folder_are_killed_at_any_moment(
    folder: Path, smollm2_gguf: Path, tmp_path: Path
) -> None:
    """Four models share the folder, and the limit has room for little more than one segment."""
    draw = random.Random(5)
    prompts = [LONG, LONG[:300] + LONG[:90], LONG[:130] + [7] * 200]
    models = [smollm2_gguf]
    for name, shape in (("hybrid", HYBRID), ("mixed", MIXED), ("mixture", MIXTURE)):
        tiny_model(tmp_path / name, **shape)
        models.append(tmp_path / name)
    models = models[: cases(2, 4)]
    expected: dict[Path, list[tuple[list[int], int]]] = {}
    for model in models:
        async with engine(model, prefix_disk_mb=0, **SMALL) as client:
            expected[model] = [await answer(client, prompt) for prompt in prompts]
    for round_ in range(cases(2, 100)):
        model = models[round_ % len(models)]
        async with engine(model, prefix_disk_mb=LIMIT_MB, **SMALL) as client:
            salt = str(draw.randrange(10))  # each principal has pages of its own
            answers = [asyncio.create_task(answer(client, prompt, salt)) for prompt in prompts]
            for ended in itertools.islice(asyncio.as_completed(answers), draw.randint(0, len(answers))):
                await ended
            # Not a synchronization: the moment is arbitrary, and often while pages of the ended requests are saved.
            await asyncio.sleep(draw.random() * 0.4)
            client._child.signal(signal.SIGKILL)
            outcomes = await asyncio.gather(*answers, return_exceptions=True)
        for (tokens, _), got in zip(expected[model], outcomes, strict=True):
            assert isinstance(got, BaseException) or got[0] == tokens
        assert sum(segment.stat().st_size for segment in segments(folder)) <= LIMIT_MB << 20
    for segment in segments(folder):
        used = segment.stat().st_mtime - 100  # no longer of a running engine
        os.utime(segment, (used, used))
    for model in models:
        async with engine(model, prefix_disk_mb=LIMIT_MB, **SMALL) as client:
            for prompt, (tokens, _) in zip(prompts, expected[model], strict=True):
                assert (await answer(client, prompt))[0] == tokens
    assert sum(segment.stat().st_size for segment in segments(folder)) <= LIMIT_MB << 20
    assert all(_records(segment) for segment in segments(folder))  # each file has contents that are read again
    namespaces = {segment.parent for segment in segments(folder)}
    others = {path for path in folder.glob("*/*") if path.suffix != ".segment"}
    assert others <= {namespace / "model" for namespace in namespaces}
