"""Checks that a request's grammar compiles before the request is admitted."""

import asyncio
import hashlib
import signal
import sys
from collections import OrderedDict
from contextlib import suppress

import msgspec

from helexa.core.errors import ApiError, overloaded, service_unavailable
from helexa.neuron.grammar.compile_result import CompileResult
from helexa.neuron.grammar.limits import MAX_BYTES, MAX_CPU_SECONDS

_COMMAND = (sys.executable, "-P", "-m", "helexa.neuron.grammar.check_process")
_MAX_KNOWN = 1024
_MAX_WAITING = 64
_MAX_ERROR = 300
_MAX_POINTER = 200
_LINE_BYTES = 1 << 20
_BROKEN = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT)  # exit codes after a stack overflow or failed allocation
_OVERLAPPING, _UNSUPPORTED = "oneOf constraints are not supported", "Unimplemented keys"  # llguidance's errors
_WITH_STRICT = ("response_format", "tools", "tool_choice")  # request fields with the option `strict`
_SECONDS = 30.0  # wall-clock limit, on a machine with other work


class GrammarChecker:
    """Checks that grammars compile, by compiling them in a separate process.

    The process starts at the first check, and again after a crash. The results of recently used grammars are cached.
    """

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._known: OrderedDict[bytes, CompileResult] = OrderedDict()

    async def compile_check(self, grammar: str, param: str) -> None:
        """Raise an error if a grammar does not compile.

        Args:
            grammar: the grammar as JSON text in llguidance's format.
            param: name of the request field that contains the grammar, for the error message.

        Raises:
            ApiError: 400 `invalid_schema` or `invalid_grammar`: the grammar is too large or does not compile. The
                message says where and why. 503: too many grammars are waiting to be checked, or the check failed.
        """
        try:
            encoded = grammar.encode()
        except UnicodeEncodeError:
            raise ApiError(400, "invalid_grammar", f"{param}: contains half of a surrogate pair", param=param) from None
        if len(encoded) > MAX_BYTES:
            raise ApiError(400, "invalid_grammar", f"{param}: larger than {MAX_BYTES >> 10} KiB", param=param)
        key = hashlib.sha256(encoded).digest()
        if key not in self._known:
            self._remember(key, await self._judge(grammar))
        self._known.move_to_end(key)
        if (result := self._known[key]).error:
            raise _error(result, param)

    async def aclose(self) -> None:
        """End the process that compiles grammars."""
        async with self._turn:
            await self._end()

    async def _judge(self, grammar: str) -> CompileResult:
        if self._waiting >= _MAX_WAITING:
            raise overloaded("too many grammars are waiting to be compiled", 1)
        self._waiting += 1
        try:
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
        if process.returncode == -signal.SIGPROF:
            return CompileResult(f"compiling it takes more than {MAX_CPU_SECONDS:g} s")
        if process.returncode in _BROKEN:
            return CompileResult("it is nested too deeply or too large to be compiled")
        raise service_unavailable("grammars cannot be checked just now", 1)

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


def _error(result: CompileResult, param: str) -> ApiError:
    place = result.rule.replace("_", " ") + (f" at {result.pointer[:_MAX_POINTER]}" if result.pointer else "")
    error = " ".join(result.error.split())[:_MAX_ERROR]
    if error.startswith(_OVERLAPPING):
        error = "several schemas of 'oneOf' may accept the same value; use 'anyOf'"
    if result.error.startswith((_OVERLAPPING, _UNSUPPORTED)) and param in _WITH_STRICT:
        error += "; with 'strict': false, the server ignores what it cannot enforce"
    code = "invalid_schema" if result.rule else "invalid_grammar"
    return ApiError(400, code, f"{param}: {place}{': ' if place else ''}{error}", param=param)
