"""Checks that a request's grammar compiles before the request is admitted."""

import asyncio
import hashlib
import signal
import sys
from collections import OrderedDict
from contextlib import suppress

import msgspec

from helexa.core.errors import ApiError, overloaded, service_unavailable

# The server, which checks grammars, and the engine, which uses them, have the same limits.
MAX_BYTES = 1 << 19  # length limit of a grammar, in UTF-8 bytes
MAX_CPU_SECONDS = 1.0  # CPU time limit of compiling a grammar

# Arguments of llguidance's `LLParserLimits`.
PARSER_LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}

_OVERLAPPING, _UNSUPPORTED = "oneOf constraints are not supported", "Unimplemented keys"  # in llguidance's errors
_WITH_STRICT = ("response_format", "tools", "tool_choice")  # request fields with the option `strict`
_MAX_ERROR = 300
_MAX_POINTER = 200

_COMMAND = (sys.executable, "-P", "-m", "helexa.neuron.grammar.check_process")
_MAX_KNOWN = 1024  # maximum number of cached results
_MAX_WAITING = 64  # maximum number of grammars that wait or are being compiled
_LINE_BYTES = 1 << 20  # maximum length of a line from the process
_BROKEN = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT)  # exit codes after a stack overflow or failed allocation
_SECONDS = 30.0  # wall-clock limit; much longer than the CPU time limit, because the machine may be busy


class CompileResult(msgspec.Struct, frozen=True):
    """Result of compiling one grammar."""

    error: str = ""  # the compiler's error; empty for a valid grammar
    rule: str = ""  # name of the JSON Schema in the grammar that causes the error; empty if unknown
    pointer: str = ""  # JSON pointer of the error within this JSON Schema; empty if unknown


class GrammarChecker:
    """Checks that grammars compile, in a separate process, and caches the results."""

    def __init__(self) -> None:
        # None before the first check and after a crash; the next check then starts the process
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()  # held while the process compiles a grammar
        self._waiting = 0  # number of grammars that wait or are being compiled
        self._known: OrderedDict[bytes, CompileResult] = OrderedDict()

    async def compile_check(self, grammar: str, param: str) -> None:
        """Raise an error if a grammar, JSON text in llguidance's format, does not compile.

        `param` is the name of the request field that contains the grammar, for the error message.

        Raises:
            ApiError: 400 `invalid_schema` or `invalid_grammar`: the grammar is too large or does not compile. The
                message says where and why. 503: too many grammars are waiting to be checked, or the check failed.
        """
        try:
            encoded = grammar.encode()
        except UnicodeEncodeError:
            raise ApiError(
                400,
                "invalid_grammar",
                f"{param}: the grammar contains an unpaired UTF-16 surrogate; remove it",
                param=param,
            ) from None
        if len(encoded) > MAX_BYTES:
            raise ApiError(
                400,
                "invalid_grammar",
                f"{param}: the grammar has {len(encoded)} bytes, more than {MAX_BYTES}; simplify it",
                param=param,
            )
        key = hashlib.sha256(encoded).digest()
        if key not in self._known:
            self._remember(key, await self._judge(grammar))
        self._known.move_to_end(key)
        if (result := self._known[key]).error:
            raise rejection(result, param)

    async def aclose(self) -> None:
        """Wait for the checks in progress, then end the process that compiles grammars."""
        async with self._turn:
            await self._end()

    async def _judge(self, grammar: str) -> CompileResult:
        if self._waiting >= _MAX_WAITING:
            raise overloaded(f"{self._waiting} grammars are already waiting to be compiled; try again", 1)
        self._waiting += 1
        try:
            # The process compiles one grammar after another.
            async with self._turn:
                return await self._compile(grammar)
        finally:
            self._waiting -= 1

    async def _compile(self, grammar: str) -> CompileResult:
        process = self._process = self._process or await asyncio.create_subprocess_exec(
            *_COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            limit=_LINE_BYTES,
        )
        assert process.stdin is not None and process.stdout is not None
        line = b""
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_SECONDS):
                    process.stdin.write(msgspec.json.encode(grammar) + b"\n")
                    with suppress(ConnectionError):
                        await process.stdin.drain()
                    if not (line := await process.stdout.readline()):
                        await process.wait()
        finally:
            if not line:  # the process died, or the check was canceled
                await asyncio.shield(self._end())
        if line:
            return msgspec.json.decode(line, type=CompileResult)
        # The timer in the process has sent SIGPROF: the CPU time limit is exceeded.
        if process.returncode == -signal.SIGPROF:
            return CompileResult(f"the grammar takes more than {MAX_CPU_SECONDS:g} s to compile; simplify it")
        if process.returncode in _BROKEN:
            return CompileResult("the grammar is nested too deeply or too large to compile; simplify it")
        raise service_unavailable("the check of the grammar failed or took too long; try again", 1)

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        await process.communicate()

    def _remember(self, key: bytes, result: CompileResult) -> None:
        self._known[key] = result
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)


def rejection(result: CompileResult, param: str) -> ApiError:
    """Return the 400 error for a grammar that does not compile.

    `result` has the compiler's error. `param` is the name of the request field with the grammar or JSON Schema.
    """
    place = result.rule.replace("_", " ") + (f" at {result.pointer[:_MAX_POINTER]}" if result.pointer else "")
    error = " ".join(result.error.split())[:_MAX_ERROR]
    if error.startswith(_OVERLAPPING):
        error = "several schemas of 'oneOf' may accept the same value; use 'anyOf'"
    if result.error.startswith((_OVERLAPPING, _UNSUPPORTED)) and param in _WITH_STRICT:
        error += "; with 'strict': false, the server ignores what it cannot enforce"
    code = "invalid_schema" if result.rule else "invalid_grammar"
    return ApiError(400, code, f"{param}: {place}{': ' if place else ''}{error}", param=param)
