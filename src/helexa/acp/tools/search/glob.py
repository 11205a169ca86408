"""The tool `glob`: find files by name."""

from typing import Annotated, Any

from msgspec import Meta

from helexa.acp.failure import ToolError
from helexa.acp.history import ToolKind
from helexa.acp.tools.builtin import Arguments, BuiltIn, as_block
from helexa.acp.tools.excerpt import title
from helexa.acp.tools.search.search import Search, report, search
from helexa.acp.tools.tool import Progress, ToolContext, ToolOutcome


class _Arguments(Arguments):
    pattern: Annotated[
        str, Meta(description="As in .gitignore: `*.py` at any depth, `src/**/*.{js,ts}`.", min_length=1)
    ]
    path: Annotated[str, Meta(description="The folder to look below; the working directory if not given.")] = "."


class Glob(BuiltIn):
    """The tool `glob`, which finds files by name."""

    name = "glob"
    description = "Find files by name. What git ignores is passed over."
    kind: ToolKind = "search"
    arguments = _Arguments

    def title(self, arguments: dict[str, Any], context: ToolContext) -> str:
        """Return a title with the file name pattern and the folder."""
        return f"Find {title(arguments['pattern'])} in {title(arguments['path'])}"

    async def run(self, arguments: dict[str, Any], context: ToolContext, progress: Progress) -> ToolOutcome:
        """Find the files that match the pattern, and return their paths for the model."""
        folder = context.boundary.resolve(arguments["path"])
        if not folder.is_folder():
            raise ToolError(f"{arguments['path']} is not a folder")
        results = await search(Search(str(folder.real), files=arguments["pattern"], max_results=500))
        content = report(results, context.boundary.brief(folder.path), "files")
        return ToolOutcome(content, shown=as_block(content))
