"""Keeps a warm standby: an engine process that is started before the server knows which model to load."""

from typing import Self

from helexa.neuron.engine_client.child import Child, Spawn


class WarmStandby:
    """Keeps at most one warm standby: an engine process that has started but not loaded a model.

    A standby process has already done the part of its start that does not depend on the model, such as the import of
    torch. As a context manager, this class calls `begin` on entry and `close` on exit.

    Args:
        spawn: function that starts an engine process.
    """

    def __init__(self, spawn: Spawn = Child.spawn) -> None:
        self._spawn = spawn
        self._child: Child | None = None

    async def begin(self) -> None:
        """Start a standby process, unless there is one already."""
        if self._child is None:
            self._child = await self._spawn()

    async def take(self) -> Child:
        """Return the standby process. If there is none, or if it has ended, return a new engine process."""
        child, self._child = self._child, None
        if child is not None and child.alive:
            return child
        return await self._spawn()

    async def close(self) -> None:
        """End the standby process if there is one."""
        child, self._child = self._child, None
        if child is not None:
            await child.end(grace=0.0)

    async def __aenter__(self) -> Self:
        await self.begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
