"""Checkpoint folders for the fake engine: a real tokenizer, no weights. The name selects the engine's behavior."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

ENGINE = (sys.executable, str(Path(__file__).with_name("fake_engine.py")))


def make_model(folder: Path, behavior: str = "well-behaved") -> Path:
    """Create a checkpoint folder named `behavior`, which selects the fake engine's behavior."""
    path = folder / behavior
    path.mkdir()
    (path / "config.json").write_text("{}")
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(letters, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(path / "tokenizer.json"))
    return path


def release(model: Path) -> None:
    """Let current and later loads of a slow model, and saving of prompts, finish."""
    model.with_suffix(".go").touch()


def starts(model: Path) -> int:
    """Return the number of engine processes started for a model."""
    return len(model.with_suffix(".starts").read_text())


async def until(condition: Callable[[], bool]) -> None:
    """Wait until `condition` returns true."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
