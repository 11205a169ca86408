"""`helexa doctor` and `helexa smoke`: check this machine, or a running server."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from cyclopts import Parameter, validators

from helexa.cli.flags_and_completion import AsJson
from helexa.cli.gateway_client import Gateway, NoAnswerError
from helexa.cli.model_loading_and_download_bar import choose_model
from helexa.cli.terminal_output_and_errors import UNREACHABLE, USAGE, CommandError, printable
from helexa.core.node_reports import Health


def doctor(*, as_json: AsJson = False) -> int:
    """Report hardware, software, the device for models, and missing parts.

    Exit code 1 means that models cannot run.

    Args:
        as_json: Print JSON for programs.
    """
    from helexa.generation.private import EngineSettings
    from helexa.neuron.doctor import examine_machine, report
    from helexa.neuron.hardware.device_choice import device_for

    settings = EngineSettings().config()
    device, why = settings.harness.torch.device, "requested"
    if device == "auto":
        choice = device_for(model_bytes=0)
        device, why = choice.device, "; ".join((choice.reason, *choice.skipped))
    return 0 if report(examine_machine(settings, device, why), as_json=as_json) else 1


_QUESTION = "What is the capital of France? Answer with one word."
_ANSWER = "paris"
_MAX_TOKENS = 256
_POLL_SECONDS = 0.5
_SHORTEST_SHA = 7


@dataclass(frozen=True)
class Check:
    """The result of one check of `helexa smoke`, with a line of details."""

    check: str
    ok: bool
    text: str


def smoke(
    url: str | None = None,
    *,
    model: Annotated[str | None, Parameter(alias="-m")] = None,
    timeout: Annotated[float, Parameter(validator=validators.Number(gt=0, lte=86_400))] = 300.0,
    expect_sha: str | None = None,
    as_json: AsJson = False,
) -> int:
    """Check a gateway or node: readiness, failed models, build, one answer.

    Each check prints one line. Exit codes: 0 all checks passed, 1 a check failed, 2 wrong usage, 3 nothing answers at
    URL until the timeout, 4 the server does not know --model.

    Args:
        url: Gateway or node to check, else HELEXA_BASE_URL, else http://127.0.0.1:31313.
        model: Model that answers, else the first loaded model.
        timeout: Maximum duration of all checks together, in seconds.
        expect_sha: Git commit that the server must run, at least seven hexadecimal digits.
        as_json: Print the results as JSON for programs.
    """
    if expect_sha is not None and len(expect_sha) < _SHORTEST_SHA:
        raise CommandError(
            f"--expect-sha {expect_sha} is too short; give at least {_SHORTEST_SHA} digits of the commit", USAGE
        )
    server = Gateway.from_environment(url)
    deadline = time.monotonic() + timeout
    checks: list[Check] = []
    for check in _run(server, model, deadline, expect_sha):
        checks.append(check)
        if not as_json:
            print(printable(f"{'ok    ' if check.ok else 'FAILED'}  {check.check}: {check.text}"), flush=True)
    ok = all(check.ok for check in checks)
    if as_json:
        print(json.dumps({"url": server.url, "ok": ok, "checks": [asdict(check) for check in checks]}, indent=2))
    return 0 if ok else 1


def _run(server: Gateway, model: str | None, deadline: float, expect_sha: str | None) -> Iterator[Check]:
    ready = _readiness(server, deadline)
    yield ready
    if not ready.ok:  # the other checks would fail for the same reason
        return
    if expect_sha is not None:
        yield _build(server, expect_sha)
    yield _failed_models(server)
    yield _answer(server, model, deadline)


def _readiness(server: Gateway, deadline: float) -> Check:
    """Wait until the server is ready or the deadline passes, and return the result.

    Raises:
        CommandError: nothing answers at the URL until the deadline. Also, at once, if the answer is not helexa's health
            report.
    """
    started = time.monotonic()
    while True:
        failure = None
        reason = None
        try:
            reason = server.unready_reason(_remaining(deadline)) or _loading(server)
        except NoAnswerError as error:  # a server that starts may accept connections before it can answer
            failure = CommandError(str(error), UNREACHABLE)
        except CommandError as error:
            # Another program answers, or the server rejects the API key. Waiting would not help in these cases.
            if error.exit_code == 1:
                raise
            failure = error
        seconds = time.monotonic() - started
        if failure is None and reason is None:
            return Check("ready", True, f"{server.url} after {seconds:.1f} s")
        if time.monotonic() + _POLL_SECONDS >= deadline:
            if failure is not None:
                raise failure
            return Check("ready", False, f"{server.url} is not ready after {seconds:.0f} s: {reason}")
        time.sleep(_POLL_SECONDS)


def _loading(server: Gateway) -> str | None:
    """Return a text that names the nodes that are loading their default models.

    Return None if no node of the gateway is loading models. The result is also None if `server` is a node, or a gateway
    that does not show its nodes to this client.
    """
    try:
        nodes = server.node_reports()
    except CommandError:
        return None
    loading = [node.name for node in nodes if node.healthy and node.activation.state != "ready"]
    return f"{', '.join(loading)} still loads models" if loading else None


def _build(server: Gateway, expected: str) -> Check:
    try:
        facts = server.get("/version")
    except CommandError as error:
        return Check("build", False, f"the commit of {server.url} is unknown: {error}")
    facts = facts if isinstance(facts, dict) else {}
    sha = str(facts.get("git_sha_long") or "unknown")
    dirty = " with uncommitted changes" if facts.get("git_dirty") else ""
    matches = sha.startswith(expected.lower()) and not dirty
    return Check("build", matches, f"{sha}{dirty}" + ("" if matches else f", expected {expected}"))


def _failed_models(server: Gateway) -> Check:
    """Check that no load failed, and that all nodes answer and can serve their models."""
    try:
        failed, note = _problems(server)
    except CommandError as error:
        return Check("models", False, str(error))
    text = "; ".join(f"{name}: {' '.join(problem.split())}" for name, problem in failed) or "no model failed"
    return Check("models", not failed, text + note)


def _problems(server: Gateway) -> tuple[list[tuple[str, str]], str]:
    """Return failed models and silent nodes with problems, and a note if incomplete."""
    health = server.get("/health")
    if not isinstance(health, dict):
        raise CommandError(
            f"{server.url}/health did not answer with a JSON object; check that the URL is that of a helexa server"
        )
    if "nodes" not in health:  # the server is a node: only a gateway's report lists nodes
        try:
            node = Health.model_validate(health)
        except ValueError:
            raise CommandError(f"{server.url} is neither a gateway nor a node of helexa; check the URL") from None
        return [(one.model_id, one.error) for one in (*node.activation.failed, *node.poisoned)], ""
    problems = [(_location(entry), str(entry.get("detail") or entry.get("reason"))) for entry in _unservable(health)]
    try:
        nodes = server.node_reports()
    except CommandError as error:
        return problems, f" (failed loads are unknown: {error})"
    problems += [(node.name, "this node does not answer") for node in nodes if not node.healthy]
    problems += [(f"{one.model_id} on {node.name}", one.error) for node in nodes for one in node.activation.failed]
    return problems, ""


def _unservable(health: dict[str, Any]) -> list[dict[str, Any]]:
    entries = health.get("unservable")
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _location(entry: dict[str, Any]) -> str:
    return f"{entry.get('model')} on {entry.get('node')}"


def _answer(server: Gateway, wanted: str | None, deadline: float) -> Check:
    """Ask a model a question with a one-word answer, and check the answer.

    Raises:
        CommandError: the server does not list the model `wanted`.
    """
    try:
        model = choose_model(server, wanted, quiet=True)
    except CommandError as error:
        if wanted is not None:
            raise
        return Check("answer", False, str(error))
    body = {
        "model": model,
        "messages": [{"role": "user", "content": _QUESTION}],
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
        "enable_thinking": False,
    }
    started = time.monotonic()
    try:
        response = server.post("/v1/chat/completions", body, _remaining(deadline))
        text = str(response["choices"][0]["message"]["content"] or "")
    except CommandError as error:
        return Check("answer", False, f"{model}: {error}")
    except (KeyError, IndexError, TypeError):
        return Check("answer", False, f"{model}: {server.url} did not answer with a chat completion; check the URL")
    seconds = time.monotonic() - started
    shown = " ".join(text.split())[:80]
    if _ANSWER not in text.lower():
        return Check("answer", False, f"{model} answered '{shown}' to '{_QUESTION}'")
    return Check("answer", True, f"{model} answered '{shown}' in {seconds:.1f} s")


def _remaining(deadline: float) -> float:
    return max(deadline - time.monotonic(), 1.0)
