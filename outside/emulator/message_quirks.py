"""Quirks in the content, tool calls and token counts of answers."""

import json
from typing import Any

from emulator.quirk import (
    DONE,
    Quirk,
    Seen,
    call,
    chunk,
    completion,
    counts,
    delta,
    event,
    finish,
    tool_call,
    usage_chunk,
)

_ADD: Any = ("add", {"a": 1, "b": 2})
_SUB: Any = ("sub", {"a": 3})
_ADD_JSON, _SUB_JSON = '{"a": 1, "b": 2}', '{"a": 3}'
_END = (finish("tool_calls"), usage_chunk(counts()), DONE)
_ONE = Seen(calls=(_ADD,), end="tool_calls", usage=(7, 2))
_TWO = Seen(calls=(_ADD, _SUB), end="tool_calls", usage=(7, 2))
_PIECES = (_ADD_JSON[:5], _ADD_JSON[5:])


def _calls(*calls: Any, reason: str = "tool_calls") -> bytes:
    return completion({"content": None, "tool_calls": list(calls)}, reason, counts())


CALLS = (
    Quirk(
        "OpenAI",
        "two well-formed calls",
        _TWO,
        (
            call(0, "add", "", "call_1"),
            *(call(0, None, piece) for piece in _PIECES),
            call(1, "sub", "", "call_2"),
            call(1, None, _SUB_JSON),
            *_END,
        ),
        _calls(tool_call("add", _ADD_JSON, id="call_1"), tool_call("sub", _SUB_JSON, id="call_2")),
    ),
    Quirk(
        "Ollama",
        "two calls with one index and no ids",
        _TWO,
        (call(0, "add", _ADD_JSON), call(0, "sub", _SUB_JSON), *_END),
        _calls(tool_call("add", _ADD_JSON), tool_call("sub", _SUB_JSON)),
    ),
    Quirk(
        "Ollama",
        "two calls of one function with one index and no ids",
        Seen(calls=(_ADD, _ADD), end="tool_calls", usage=(7, 2)),
        (call(0, "add", _ADD_JSON), call(0, "add", _ADD_JSON), *_END),
    ),
    Quirk(
        "Ollama",
        "two calls with one index and different ids",
        _TWO,
        (call(0, "add", _ADD_JSON, "call_1"), call(0, "sub", _SUB_JSON, "call_2"), *_END),
    ),
    Quirk(
        "vLLM",
        "two calls with one index and no ids, in pieces",
        _TWO,
        (
            call(0, "add", ""),
            *(call(0, None, piece) for piece in _PIECES),
            call(0, "sub", ""),
            call(0, None, _SUB_JSON),
            *_END,
        ),
    ),
    Quirk(
        "Gemini",
        "two calls without index and ids",
        _TWO,
        (call(None, "add", _ADD_JSON), call(None, "sub", _SUB_JSON), *_END),
    ),
    Quirk(
        "MiniMax",
        "an id that is repeated in each delta without an index",
        _TWO,
        (
            call(None, "add", _PIECES[0], "call_1"),
            call(None, None, _PIECES[1], "call_1"),
            call(None, "sub", _SUB_JSON, "call_2"),
            *_END,
        ),
    ),
    Quirk(
        "SGLang",
        "id and name that are repeated in each delta",
        _ONE,
        (*(call(0, "add", piece, "call_1") for piece in _PIECES), *_END),
    ),
    Quirk(
        "MiniMax",
        "a name that is repeated in each delta without an id",
        _ONE,
        (*(call(0, "add", piece) for piece in _PIECES), call(0, "add", ""), *_END),
    ),
    Quirk(
        "LM Studio",
        "an empty id and an empty name in later deltas",
        _ONE,
        (call(0, "add", "", "call_1"), *(call(0, "", piece, "") for piece in _PIECES), *_END),
    ),
    Quirk(
        "vLLM",
        "two calls with the same id",
        _TWO,
        (call(0, "add", _ADD_JSON, "call_1"), call(1, "sub", _SUB_JSON, "call_1"), *_END),
        _calls(tool_call("add", _ADD_JSON, id="call_1"), tool_call("sub", _SUB_JSON, id="call_1")),
    ),
    Quirk(
        "LM Studio",
        "the id of an earlier call in the conversation",
        _ONE,
        (call(0, "add", _ADD_JSON, "earlier"), *_END),
        _calls(tool_call("add", _ADD_JSON, id="earlier")),
    ),
    Quirk(
        "Ollama",
        "indexes that begin at 1",
        _TWO,
        (call(1, "add", _ADD_JSON, "call_1"), call(2, "sub", _SUB_JSON, "call_2"), *_END),
    ),
    Quirk(
        "Ollama",
        "arguments as an object",
        _ONE,
        (call(0, "add", _ADD[1], "call_1"), *_END),
        _calls(tool_call("add", _ADD[1], id="call_1")),
    ),
    Quirk(
        "llama.cpp",
        "null arguments before the arguments",
        _ONE,
        (
            delta(tool_calls=[{"index": 0, "id": "call_1", "function": {"name": "add", "arguments": None}}]),
            call(0, None, _ADD_JSON),
            *_END,
        ),
    ),
    Quirk(
        "TabbyAPI",
        "a call that is not in a list",
        _ONE,
        (delta(tool_calls=tool_call("add", _ADD_JSON)), *_END),
        completion({"tool_calls": tool_call("add", _ADD_JSON)}, "tool_calls", counts()),
    ),
    Quirk(
        "KoboldCpp",
        "the finish reason `stop` after a call",
        Seen(calls=(_ADD,), end="tool_calls", usage=(7, 2)),
        (call(0, "add", _ADD_JSON, "call_1"), finish("stop"), *_END[1:]),
        _calls(tool_call("add", _ADD_JSON, id="call_1"), reason="stop"),
    ),
    Quirk(
        "llama-cpp-python",
        "the deprecated `function_call`",
        _ONE,
        (
            delta(function_call={"name": "add", "arguments": ""}),
            *(delta(function_call={"name": "add", "arguments": piece}) for piece in _PIECES),
            finish("function_call"),
            *_END[1:],
        ),
        completion(
            {"content": None, "function_call": {"name": "add", "arguments": _ADD_JSON}}, "function_call", counts()
        ),
    ),
    Quirk(
        "llama-cpp-python",
        "`function_call` beside the same `tool_calls`",
        _ONE,
        (
            delta(
                function_call={"name": "add", "arguments": _ADD_JSON},
                tool_calls=[{"index": 0, "id": "call_1"} | tool_call("add", _ADD_JSON)],
            ),
            *_END,
        ),
        completion(
            {
                "function_call": {"name": "add", "arguments": _ADD_JSON},
                "tool_calls": [tool_call("add", _ADD_JSON, id="call_1")],
            },
            "tool_calls",
            counts(),
        ),
    ),
    Quirk(
        "vLLM",
        "text between the pieces of a call",
        Seen("Hi", calls=(_ADD,), end="tool_calls", usage=(7, 2)),
        (
            delta(content="H"),
            call(0, "add", _PIECES[0], "call_1"),
            delta(content="i"),
            call(0, None, _PIECES[1]),
            *_END,
        ),
    ),
    Quirk(
        "vLLM",
        "arguments that are encoded twice",
        _ONE,
        whole=_calls(tool_call("add", json.dumps(_ADD_JSON), id="call_1")),
    ),
    Quirk(
        "vLLM",
        "empty arguments that are encoded twice",
        Seen(calls=(("add", {}),), end="tool_calls", usage=(7, 2)),
        whole=_calls(tool_call("add", json.dumps("{}"), id="call_1")),
    ),
    Quirk(
        "vLLM",
        "text, then a call, in one chunk with the finish reason",
        Seen("Hi", calls=(_ADD,), end="tool_calls", usage=(7, 2)),
        (
            chunk(
                {
                    "delta": {"content": "Hi", "tool_calls": [{"index": 0} | tool_call("add", _ADD_JSON)]},
                    "finish_reason": "tool_calls",
                }
            ),
            *_END[1:],
        ),
    ),
)

_TEXT = Seen("Hello", usage=(7, 2))
_TEXT_END = (finish(), usage_chunk(counts()), DONE)
_THOUGHT = Seen("Hello", "Hm", usage=(7, 2))
_PARTS = [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm"}]}, {"type": "text", "text": "Hello"}]

CONTENT = (
    Quirk(
        "Mistral",
        "content as a list of parts",
        _TEXT,
        (delta(content=[{"type": "text", "text": "Hel"}]), delta(content=[{"type": "text", "text": "lo"}]), *_TEXT_END),
        completion({"content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}, usage=counts()),
    ),
    Quirk(
        "Mistral",
        "reasoning as a part of the content",
        _THOUGHT,
        (delta(content=_PARTS[:1]), delta(content="Hello"), *_TEXT_END),
        completion({"content": _PARTS}, usage=counts()),
    ),
    *(
        Quirk(
            backend,
            f"reasoning as `{name}`",
            _THOUGHT,
            (delta(**{name: "H"}), delta(**{name: "m", "content": None}), delta(content="Hello"), *_TEXT_END),
            completion({"content": "Hello", name: "Hm"}, usage=counts()),
        )
        for backend, name in (("DeepSeek", "reasoning_content"), ("Ollama", "reasoning"), ("Ollama", "thinking"))
    ),
    Quirk(
        "vLLM",
        "an empty list of calls in each chunk",
        _TEXT,
        (*(delta(content=text, tool_calls=[], refusal=None) for text in ("Hel", "lo")), *_TEXT_END),
        completion({"content": "Hello", "tool_calls": []}, usage=counts()),
    ),
    Quirk(
        "SGLang",
        "reasoning again after text and a call",
        Seen("Hello", "HmOhAh", (_ADD,), "tool_calls", (7, 2)),
        (
            delta(reasoning_content="Hm"),
            delta(content="Hel"),
            delta(reasoning_content="Oh"),
            call(0, "add", _ADD_JSON, "call_1"),
            delta(reasoning_content="Ah"),
            delta(content="lo"),
            *_END,
        ),
    ),
    Quirk(
        "LM Studio",
        "half of a surrogate pair",
        Seen("Hi \ufffd", usage=(7, 2)),
        (delta(content="Hi _").replace(b"_", rb"\ud83d"), *_TEXT_END),
        completion({"content": "Hi _"}, usage=counts()).replace(b'_"', rb"\ud83d" + b'"'),
    ),
    Quirk(
        "OpenRouter",
        "the same reasoning in two fields",
        _THOUGHT,
        (delta(reasoning="Hm", reasoning_content="Hm"), delta(content="Hello"), *_TEXT_END),
        completion({"content": "Hello", "reasoning": "Hm", "reasoning_content": "Hm"}, usage=counts()),
    ),
    Quirk(
        "MiniMax",
        "`message` in place of `delta`",
        _TEXT,
        (*(chunk({"message": {"role": "assistant", "content": text}}) for text in ("Hel", "lo")), *_TEXT_END),
    ),
    Quirk(
        "MiniMax",
        "the whole message after its deltas",
        _TEXT,
        (
            delta(content="Hel"),
            delta(content="lo"),
            chunk({"message": {"content": "Hello"}, "finish_reason": "stop"}, object="chat.completion", usage=counts()),
        ),
    ),
    Quirk(
        "MiniMax",
        "the whole message with a call after its deltas",
        Seen("Hello", calls=(_ADD,), end="tool_calls", usage=(7, 2)),
        (
            delta(content="Hello"),
            call(0, "add", _ADD_JSON, "call_1"),
            chunk(
                {
                    "message": {"content": "Hello", "tool_calls": [tool_call("add", _ADD_JSON, id="call_1")]},
                    "finish_reason": "tool_calls",
                },
                usage=counts(),
            ),
            DONE,
        ),
    ),
    Quirk(
        "KoboldCpp",
        "`text` in place of a message",
        _TEXT,
        (*(chunk({"text": text}) for text in ("Hel", "lo")), *_TEXT_END),
        event({"choices": [{"text": "Hello", "finish_reason": "stop"}], "usage": counts()})[6:],
    ),
    Quirk(
        "Ollama",
        "a message without content",
        Seen("", usage=(7, 2)),
        (delta(role="assistant"), *_TEXT_END),
        completion({}, usage=counts()),
    ),
)


def _counted(backend: str, name: str, usage: Any, seen: tuple[int, int] | None, **fields: Any) -> Quirk:
    """Return a quirk with the token counts `usage`, as a last chunk with `fields` and in a whole answer."""
    last = event({"id": "c1", "choices": [], "usage": usage} | fields)
    return Quirk(
        backend,
        name,
        Seen("Hello", usage=seen),
        (delta(content="Hel"), delta(content="lo"), finish(), last, DONE),
        completion({"content": "Hello"}, usage=usage, **fields),
    )


USAGE = (
    _counted("SGLang", "token counts under Anthropic's names", {"input_tokens": 7, "output_tokens": 2}, (7, 2)),
    _counted("LM Studio", "token counts as floats", counts(7.0, 2.0), (7, 2)),
    _counted("MiniMax", "token counts as strings", counts("7", "2"), (7, 2)),
    _counted("LiteLLM", "token counts of 0", counts(0, 0), None),
    _counted("SGLang", "no tokens of the prompt", counts(0, 2), None),
    _counted("vLLM", "no tokens of the answer", counts(7, 0), None),
    _counted("LiteLLM", "null token counts", counts(None, None), None),
    _counted("TabbyAPI", "an empty usage object", {}, None),
    _counted("KoboldCpp", "no token counts", None, None),
    _counted(
        "llama.cpp",
        "token counts in `timings`",
        None,
        (7, 2),
        timings={"cache_n": 3, "prompt_n": 4, "predicted_n": 2},
    ),
    _counted("Groq", "token counts in `x_groq`", None, (7, 2), x_groq={"usage": counts()}),
    _counted("Ollama", "token counts under Ollama's names", None, (7, 2), prompt_eval_count=7, eval_count=2),
    Quirk(
        "Moonshot",
        "token counts in the choice",
        Seen("Hello", usage=(7, 2)),
        (delta(content="Hello"), chunk({"delta": {}, "finish_reason": "stop", "usage": counts()}), DONE),
    ),
)

QUIRKS = (*CALLS, *CONTENT, *USAGE)
