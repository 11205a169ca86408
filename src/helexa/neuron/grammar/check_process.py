"""Program that compiles grammars: a malicious grammar crashes only this program.

The program reads one grammar per line, as a JSON string, and writes one `CompileResult` per line, in JSON. It exits at
the end of standard input.
"""

import json
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llguidance
import msgspec

from helexa.neuron.grammar.grammar_check_and_rejection import MAX_CPU_SECONDS, PARSER_LIMITS, CompileResult
from helexa.neuron.parsers.json_schema import DEFINITIONS

_MEMORY_BYTES = 512 << 20  # maximum growth of the address space after the start
# Smaller than the stack of any thread that compiles the same grammar later. A grammar that overflows a stack therefore
# crashes this process, and is not compiled later.
_STACK_BYTES = 2 << 20
_SEARCH_SECONDS = 0.3  # CPU time limit of `_pointer`
_MAX_TEXT = 1000
_MAPS = (*DEFINITIONS, "properties", "patternProperties", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")


def judge(grammar: str) -> CompileResult:
    """Return the result of compiling `grammar`, with the place of an error if known.

    If compiling takes more than `MAX_CPU_SECONDS`, the signal SIGPROF ends this process.
    """
    if not (error := _error_of(grammar)):
        return CompileResult()
    # The compiler's message names neither the schema nor the place in it. To find them, compile each schema alone.
    for rule in json.loads(grammar)["grammars"]:
        if "json_schema" in rule and (schema_error := _error_of_schema(rule["json_schema"])):
            return CompileResult(schema_error, rule["name"], _pointer(rule["json_schema"], schema_error)[:_MAX_TEXT])
    return CompileResult(error)


def _error_of(grammar: str) -> str:
    limits = llguidance.LLParserLimits(**PARSER_LIMITS)
    # After `MAX_CPU_SECONDS` of CPU time, the signal SIGPROF ends this process.
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_SECONDS)
    error = llguidance.LLMatcher.validate_grammar(grammar, limits=limits)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return error[:_MAX_TEXT]


def _error_of_schema(schema: Any) -> str:
    return _error_of(json.dumps({"grammars": [{"json_schema": schema}]}))


def _pointer(schema: dict[str, Any], error: str) -> str:
    """Return the JSON pointer of the innermost subschema that alone causes `error`.

    The search has a time limit, after which the function returns the innermost subschema found so far.
    """
    context = {key: schema[key] for key in (*DEFINITIONS, "x-guidance") if key in schema}
    pointer = ""
    end = time.process_time() + _SEARCH_SECONDS
    current: Any = schema
    while True:
        for step, subschema in _subschemas(current):
            if time.process_time() > end:
                return pointer
            if isinstance(subschema, dict) and _error_of_schema(subschema | context) == error:
                current, pointer = subschema, pointer + step
                break
        else:
            return pointer


def _subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in _MAPS:
        for name, subschema in schema[key].items() if isinstance(schema.get(key), dict) else ():
            yield f"/{key}/{name.replace('~', '~0').replace('/', '~1')}", subschema
    for key in _LISTS:
        for index, subschema in enumerate(schema[key] if isinstance(schema.get(key), list) else ()):
            yield f"/{key}/{index}", subschema
    for key in _SINGLE:
        if key in schema:
            yield f"/{key}", schema[key]


def _serve() -> None:
    for line in sys.stdin.buffer:
        try:
            result = judge(json.loads(line))
        except Exception as error:  # any exception is caused by the grammar
            result = CompileResult(f"the grammar cannot be compiled: {type(error).__name__}; simplify it")
        sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
        sys.stdout.buffer.flush()


def main() -> None:
    """Compile grammars and write the results, until standard input ends."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # after the time limit, the signal ends the process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # other systems do not enforce the limit on address space
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, used + _MEMORY_BYTES))
    threading.stack_size(_STACK_BYTES)
    server = threading.Thread(target=_serve)
    server.start()
    server.join()


if __name__ == "__main__":
    main()
