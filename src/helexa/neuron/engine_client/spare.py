"""An engine process that is started before it is known what it will load, which most of its start is not about."""

from typing import Self

from helexa.neuron.engine_client.child import Child, Spawn


class Spare:
    """Holds one process at most, from `begin` until it is taken or closed: as a context manager, for its block.

    Args:
        spawn: starts a process.
    """

    def __init__(self, spawn: Spawn = Child.spawn) -> None:
        self._spawn = spawn
        self._child: Child | None = None

    async def begin(self) -> None:
        """Start one, unless there is one."""
        if self._child is None:
            self._child = await self._spawn()

    async def take(self) -> Child:
        """The one that was begun, if it lives, else a new one."""
        child, self._child = self._child, None
        if child is not None and child.alive:
            return child
        return await self._spawn()

    async def close(self) -> None:
        """End it if nobody has taken it."""
        child, self._child = self._child, None
        if child is not None:
            await child.end(grace=0.0)

    async def __aenter__(self) -> Self:
        await self.begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
