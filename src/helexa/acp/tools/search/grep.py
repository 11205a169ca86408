"""The tool `grep`: find lines of files that match a regular expression."""

from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

from helexa.acp.failure import ToolError
from helexa.acp.history import Location, ToolKind
from helexa.acp.tools.builtin import Arguments, BuiltIn, as_block
from helexa.acp.tools.excerpt import title
from helexa.acp.tools.search.search import Search, report, search
from helexa.acp.tools.tool import Progress, ToolContext, ToolOutcome

_MAX_LOCATIONS = 20


class _Arguments(Arguments):
    pattern: Annotated[str, Meta(description="A regular expression (Python's), for one line.", min_length=1)]
    path: Annotated[str, Meta(description="The file or folder to look in; the working directory if not given.")] = "."
    glob: Annotated[str, Meta(description="Only files like this: `*.py`.", min_length=1)] | UnsetType = UNSET
    ignore_case: bool = False


class Grep(BuiltIn):
    """The tool `grep`, which finds lines that match a regular expression."""

    name = "grep"
    description = "Find lines of text files by a regular expression. What git ignores is passed over."
    kind: ToolKind = "search"
    arguments = _Arguments

    def title(self, arguments: dict[str, Any], context: ToolContext) -> str:
        """Return a title with the regular expression and the path to search."""
        return f"Search for {title(arguments['pattern'])} in {title(arguments['path'])}"

    async def run(self, arguments: dict[str, Any], context: ToolContext, progress: Progress) -> ToolOutcome:
        """Find the lines that match the regular expression, and return them with file path and line number."""
        target = context.boundary.resolve(arguments["path"])
        if not target.exists():
            raise ToolError(f"There is no {arguments['path']}")
        in_folder = target.is_folder()
        folder = target if in_folder else context.boundary.resolve(str(target.path.parent))
        results = await search(
            Search(
                str(folder.real),
                file=None if in_folder else target.real.name,
                files=arguments.get("glob"),
                text=arguments["pattern"],
                ignore_case=arguments["ignore_case"],
            )
        )
        content = report(results, context.boundary.brief(folder.path), "matches")
        locations = (Location(str(folder.path / match.path), match.line) for match in results.matches[:_MAX_LOCATIONS])
        return ToolOutcome(content, shown=as_block(content), locations=tuple(locations))
