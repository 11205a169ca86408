"""The tools of a session in a temporary folder, without a client."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from helexa.acp.config import Endpoint, Settings
from helexa.acp.conversation_and_events import CardContent
from helexa.acp.host import LocalHost, ToolError
from helexa.acp.tools.tool_and_effects import ToolContext, ToolOutcome
from helexa.acp.tools.toolbox import Toolbox, open_toolbox


@dataclass
class Workplace:
    """A folder and its tools.

    Attributes:
        progress: contents that running tools have shown.
    """

    folder: Path
    context: ToolContext
    box: Toolbox
    progress: list[tuple[CardContent, ...]] = field(default_factory=list)

    async def call(self, name: str, **arguments: Any) -> ToolOutcome:
        """Call all methods of a tool in the order of the agent, and return the outcome."""
        tool = self.box.find(name)
        assert tool is not None
        arguments = tool.check(arguments)
        tool.title(arguments, self.context)
        tool.locations(arguments, self.context)
        tool.act(arguments, self.context)
        await tool.preview(arguments, self.context)
        return await tool.run(arguments, self.context, self._show)

    async def failure(self, name: str, **arguments: Any) -> str:
        """Return the error message of a call that must fail."""
        with pytest.raises(ToolError) as caught:
            await self.call(name, **arguments)
        return str(caught.value)

    async def _show(self, content: tuple[CardContent, ...]) -> None:
        self.progress.append(content)


def context_for(folder: Path) -> ToolContext:
    settings = Settings(endpoints=(Endpoint(name="a", base_url="http://a/v1"),), default_endpoint="a", allow_fetch=True)
    return ToolContext("session", folder, (folder,), folder.parent / "plans", LocalHost(), settings)


@pytest.fixture
async def workplace(tmp_path: Path) -> AsyncIterator[Workplace]:
    folder = tmp_path / "project"
    folder.mkdir()
    context = context_for(folder)
    box = await open_toolbox(context)
    yield Workplace(folder, context, box)
    await box.close()
