"""An agent at work: installed by npm, in an empty home, with the gateway as its only way out."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from clients.agents import PROMPT, Agent, errand
from clients.saying_stack import saying_stack
from clients.wiretap import Heard, Wiretap
from npm import NODE, NODE_PATH, installed

PATIENCE_SECONDS = 120  # a bound for waits on a busy machine, never a measure


@dataclass
class Outcome:
    """What an errand came to.

    Attributes:
        text: what the agent printed.
        note: what is in the file that it was to write, None without one.
        heard: its requests to the gateway.
        strays: hosts and ports that it wanted to reach besides.
        asked: prompts that reached the model.
    """

    status: int
    text: str
    note: str | None
    heard: list[Heard]
    strays: set[str]
    asked: list[str]


async def run(agent: Agent, home: Path) -> Outcome:
    """Have an agent run its errand, through a gateway and a node, with a scripted model."""
    program = await asyncio.to_thread(installed, agent.package) / agent.program
    folder = home / "work"
    folder.mkdir()
    async with saying_stack(home) as stack, Wiretap(stack.url).listening() as tap:

        def filled(text: str) -> str:
            return text.replace("{url}", tap.url).replace("{folder}", str(folder))

        prompt = errand([(name, {key: filled(text) for key, text in call.items()}) for name, call in agent.errand])
        for name, text in agent.files.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(filled(text))
        environ = {"PATH": NODE_PATH, "HOME": str(home), "TMPDIR": str(home)}
        environ |= {"HTTP_PROXY": tap.url, "HTTPS_PROXY": tap.url, "NO_PROXY": "127.0.0.1,localhost"}
        process = await asyncio.create_subprocess_exec(
            *([NODE] if program.suffix in (".js", ".cjs") else []),
            program,
            *[prompt if argument == PROMPT else argument for argument in agent.arguments],
            cwd=folder,
            env=environ | {name: filled(value) for name, value in agent.environ.items()},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        asked = [request["prompt"] for request in stack.asked()]
    note = folder / "note.txt"
    return Outcome(
        status=process.returncode or 0,
        text=output.decode(errors="replace"),
        note=note.read_text() if note.exists() else None,
        heard=tap.heard,
        strays=tap.strays,
        asked=asked,
    )
