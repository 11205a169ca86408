"""Runs a coding agent: installed by npm, in an empty home directory, with network access only to the gateway."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from clients.coding_agents.agents import PROMPT, Agent, task_prompt
from clients.coding_agents.recording_proxy import ForwardedRequest, Wiretap
from clients.scripted_stack import saying_stack
from npm import NODE, NODE_PATH, installed

TIMEOUT_SECONDS = 120  # a limit for a busy machine; no test measures time with it


@dataclass
class Outcome:
    """The result of an agent's task.

    Attributes:
        status: the agent's exit code.
        text: the agent's output on stdout and stderr.
        note: content of the file that the task creates, None if the file is missing.
        requests: the agent's requests to the gateway.
        rejected_hosts: other hosts, with ports, that the agent tried to reach.
        prompts: prompts that reached the model.
    """

    status: int
    text: str
    note: str | None
    requests: list[ForwardedRequest]
    rejected_hosts: set[str]
    prompts: list[str]


async def run(agent: Agent, home: Path) -> Outcome:
    """Run an agent's task through a gateway and a node with a scripted model."""
    program = await asyncio.to_thread(installed, agent.package) / agent.program
    folder = home / "work"
    folder.mkdir()
    async with saying_stack(home) as stack, Wiretap(stack.url).listening() as tap:

        def fill(text: str) -> str:
            return text.replace("{url}", tap.url).replace("{folder}", str(folder))

        prompt = task_prompt(
            [(name, {key: fill(text) for key, text in call.items()}) for name, call in agent.tool_calls]
        )
        for name, text in agent.files.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(fill(text))
        environ = {"PATH": NODE_PATH, "HOME": str(home), "TMPDIR": str(home)}
        environ |= {"HTTP_PROXY": tap.url, "HTTPS_PROXY": tap.url, "NO_PROXY": "127.0.0.1,localhost"}
        process = await asyncio.create_subprocess_exec(
            *([NODE] if program.suffix in (".js", ".cjs") else []),
            program,
            *[prompt if argument == PROMPT else argument for argument in agent.arguments],
            cwd=folder,
            env=environ | {name: fill(value) for name, value in agent.environ.items()},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        prompts = [request["prompt"] for request in stack.received_requests()]
    note = folder / "note.txt"
    return Outcome(
        status=process.returncode or 0,
        text=output.decode(errors="replace"),
        note=note.read_text() if note.exists() else None,
        requests=tap.requests,
        rejected_hosts=tap.rejected_hosts,
        prompts=prompts,
    )
