"""Crossing between a caller and the background loop, where Ctrl-C may come at any moment."""

import asyncio

import pytest

from helexa.generation.background import Blocking, across, background, blocking_each


class InterruptedAtOnce(Blocking):
    """Ctrl-C comes when the first step is under way and nobody waits for it yet."""

    def __init__(self):
        self.interrupted = False

    async def wait(self, work):
        if self.interrupted:
            return await super().wait(work)
        self.interrupted = True
        background().submit(work)
        raise KeyboardInterrupt


def test_an_interruption_before_the_first_wait_ends_what_is_under_way():
    ended = []

    async def silent():
        try:
            await asyncio.Event().wait()
            yield 1
        finally:
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        next(blocking_each(across(InterruptedAtOnce(), silent())))
    assert ended == [True]
