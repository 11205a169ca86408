"""Calls from a caller's thread into the background event loop, interrupted by Ctrl-C."""

import asyncio

import pytest

from helexa.generation.background_event_loop import BlockingCaller, across, background, blocking_each


class InterruptedAtOnce(BlockingCaller):
    """Raise KeyboardInterrupt after the first step was submitted and before the caller waits for it."""

    def __init__(self):
        self.interrupted = False

    async def wait(self, work):
        if self.interrupted:
            return await super().wait(work)
        self.interrupted = True
        background().submit(work)
        raise KeyboardInterrupt


def test_keyboard_interrupt_in_a_synchronous_loop_over_a_stream_cancels_its_coroutine():
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
