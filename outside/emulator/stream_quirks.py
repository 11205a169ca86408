"""Quirks in how backends begin, frame and end their answers."""

import json

from emulator.quirk import DONE, Quirk, Seen, call, chunk, completion, counts, delta, event, finish, usage_chunk

_HELLO = (delta(role="assistant", content=""), delta(content="Hel"), delta(content="lo"))
_TEXT = Seen("Hello", usage=(7, 2))
_END = (finish(), usage_chunk(counts()), DONE)
_STREAM = (*_HELLO, *_END)
_WHOLE = completion({"content": "Hello"}, usage=counts())


def _joined(*pieces: bytes) -> bytes:
    return b"".join(pieces)


def _in_lines(piece: bytes) -> bytes:
    """Return an event with its JSON value on several lines."""
    data = piece.removeprefix(b"data: ").rstrip()
    lines = json.dumps(json.loads(data), indent=1).encode().split(b"\n") if data.startswith(b"{") else [data]
    return b"".join([b"data: " + line + b"\n" for line in lines]) + b"\n"


def _error(text: str) -> Seen:
    return Seen("Hello", end="error", error=text)


QUIRKS = (
    Quirk("OpenAI", "a well-formed answer", _TEXT, _STREAM, _WHOLE),
    # Ends that are none.
    Quirk("llama-cpp-python", "`[DONE]` without a finish reason", _error("finish reason"), (*_HELLO, DONE)),
    Quirk(
        "llama-cpp-python",
        "`[DONE]` without a finish reason, then the connection breaks",
        _error(""),
        (*_HELLO, DONE),
        breaks=True,
    ),
    Quirk("KoboldCpp", "`[DONE]` as the only event", Seen(end="error", error="finish reason"), (DONE,)),
    Quirk("vLLM", "an empty body", Seen(end="error"), (b"",), b""),
    Quirk("vLLM", "keep-alive comments and no answer", Seen(end="error"), (b": ping\n\n", b": ping\n\n")),
    Quirk("LM Studio", "a stream that ends without a finish reason", _error("finish reason"), _HELLO),
    Quirk(
        "MiniMax",
        "an empty finish reason in each chunk of a truncated stream",
        _error("finish reason"),
        tuple(chunk({"delta": {"content": text}, "finish_reason": ""}) for text in ("Hel", "lo")),
    ),
    Quirk(
        "KoboldCpp",
        'the finish reason "null" in each chunk of a truncated stream',
        _error("finish reason"),
        (*(chunk({"delta": {"content": text}, "finish_reason": "null"}) for text in ("Hel", "lo")), DONE),
    ),
    Quirk(
        "MiniMax",
        "an empty finish reason in each chunk before the end",
        _TEXT,
        (*(chunk({"delta": {"content": text}, "finish_reason": ""}) for text in ("Hel", "lo")), *_END),
        completion({"content": "Hello"}, "", counts()),
    ),
    Quirk("vLLM", "a connection that breaks within an event", _error(""), (*_HELLO, _STREAM[1][:40]), breaks=True),
    Quirk(
        "SGLang",
        "no choices in a whole answer",
        Seen(end="error"),
        (usage_chunk(counts()), DONE),
        json.dumps({"id": "c1", "choices": [], "usage": counts()}).encode(),
    ),
    Quirk("LiteLLM", "null choices in a whole answer", Seen(end="error"), (), b'{"id":"c1","choices":null}'),
    # Ends.
    Quirk("LiteLLM", "the connection breaks after `[DONE]`", _TEXT, _STREAM, breaks=True),
    Quirk("Ollama", "a stream that ends with its finish reason", Seen("Hello"), (*_HELLO, finish())),
    Quirk(
        "vLLM",
        "the last text and the finish reason in one chunk",
        _TEXT,
        (*_HELLO[:2], chunk({"delta": {"content": "lo"}, "finish_reason": "stop"}), *_END[1:]),
    ),
    Quirk(
        "LiteLLM",
        'the finish reason "length", then "stop" beside the usage',
        Seen("Hello", end="length", usage=(7, 2)),
        (*_HELLO, finish("length"), finish("stop", usage=counts()), DONE),
    ),
    Quirk(
        "KoboldCpp",
        "a finish reason in each chunk",
        _TEXT,
        (*(chunk({"delta": {"content": text}, "finish_reason": "stop"}) for text in ("Hel", "lo")), *_END[1:]),
    ),
    Quirk(
        "KoboldCpp",
        'the finish reason "stop" in each chunk of a truncated answer',
        Seen("Hello", end="length", usage=(7, 2)),
        (
            chunk({"delta": {"content": "Hel"}, "finish_reason": "stop"}),
            chunk({"delta": {"content": "lo"}, "finish_reason": "length"}),
            *_END[1:],
        ),
    ),
    Quirk(
        "KoboldCpp",
        "a finish reason after each chunk",
        _TEXT,
        (delta(content="Hel"), finish(), delta(content="lo"), *_END),
    ),
    Quirk(
        "KoboldCpp",
        "a finish reason after each piece of a tool call",
        Seen(calls=(("add", {"a": 1}),), end="tool_calls", usage=(7, 2)),
        (call(0, "add", '{"a":', id="c1"), finish(), call(0, arguments=" 1}"), *_END),
    ),
    Quirk(
        "Perplexity",
        "the token counts so far in each chunk",
        _TEXT,
        (
            chunk({"delta": {"role": "assistant", "content": "Hel"}, "finish_reason": None}, usage=counts(7, 1)),
            chunk({"delta": {"content": "lo"}, "finish_reason": None}, usage=counts(7, 2)),
            finish(usage=counts(7, 2)),
            DONE,
        ),
    ),
    Quirk(
        "Perplexity",
        "the token counts so far and a finish reason in each chunk",
        _TEXT,
        (
            chunk({"delta": {"content": "Hel"}, "finish_reason": "stop"}, usage=counts(7, 1)),
            chunk({"delta": {"content": "lo"}, "finish_reason": "stop"}, usage=counts(7, 2)),
            DONE,
        ),
    ),
    Quirk(
        "vLLM",
        "the token counts so far in each chunk, and a chunk with the counts at the end",
        _TEXT,
        (
            chunk({"delta": {"content": "Hel"}, "finish_reason": None}, usage=counts(7, 1)),
            chunk({"delta": {"content": "lo"}, "finish_reason": "stop"}, usage=counts(7, 2)),
            *_END[1:],
        ),
    ),
    Quirk(
        "LiteLLM",
        "the token counts of the prompt in the first chunk, and of the answer at the end",
        _TEXT,
        (
            chunk({"delta": {"content": "Hello"}, "finish_reason": None}, usage=counts(7, 0)),
            finish(usage=counts(7, 2)),
            DONE,
        ),
    ),
    *(
        Quirk(
            backend,
            f"the finish reason {reason!r}",
            Seen("Hello", end=meaning, usage=(7, 2), error=error),
            (*_HELLO, finish(reason), *_END[1:]),
            completion({"content": "Hello"}, reason, counts()),
        )
        for backend, reason, meaning, error in (
            ("Gemini", "MAX_TOKENS", "length", ""),
            ("Gemini", "STOP", "stop", ""),
            ("Gemini", "SAFETY", "content_filter", ""),
            ("Mistral", "model_length", "length", ""),
            ("Mistral", "error", "error", "error"),
            ("vLLM", "abort", "error", "abort"),
            ("TGI", "eos_token", "stop", ""),
            ("Zhipu", "sensitive", "content_filter", ""),
            ("DeepSeek", "insufficient_system_resource", "error", "insufficient_system_resource"),
            ("Cohere", "COMPLETE", "stop", ""),
        )
    ),
    Quirk(
        "SGLang",
        "a finish reason that is an object",
        _TEXT,
        (*_HELLO, finish({"type": "stop", "matched": 2}), *_END[1:]),
        completion({"content": "Hello"}, {"type": "stop", "matched": 2}, counts()),
    ),
    # Framing.
    Quirk("llama.cpp", "lines that end with CRLF", _TEXT, (_joined(*_STREAM).replace(b"\n", b"\r\n"),)),
    Quirk("TabbyAPI", "no space after `data:`", _TEXT, (_joined(*_STREAM).replace(b"data: ", b"data:"),)),
    Quirk("MiniMax", "`[DONE] ` with a space", _TEXT, (*_STREAM[:-1], b"data: [DONE] \n\n")),
    Quirk("LM Studio", "events with a name", _TEXT, tuple(b"event: message\n" + piece for piece in _STREAM)),
    Quirk("MiniMax", "events with an id", _TEXT, tuple(b"id: 7\n" + piece for piece in _STREAM)),
    Quirk("vLLM", "one byte at a time", _TEXT, tuple(bytes([byte]) for byte in _joined(*_STREAM))),
    Quirk("LM Studio", "events with several lines of data", _TEXT, tuple(map(_in_lines, _STREAM))),
    Quirk(
        "Ollama",
        "events without an empty line between them",
        _TEXT,
        (_joined(*_STREAM).replace(b"\n\n", b"\n") + b"\n",),
    ),
    Quirk(
        "LM Studio", "a byte order mark", _TEXT, (b"\xef\xbb\xbf" + _STREAM[0], *_STREAM[1:]), b"\xef\xbb\xbf" + _WHOLE
    ),
    Quirk("LiteLLM", "the last event without an empty line after it", _TEXT, (*_STREAM[:-1], b"data: [DONE]")),
    Quirk("vLLM", "keep-alive comments between events", _TEXT, (b": ping\n\n", *_HELLO, b":\n\n", *_END)),
    Quirk(
        "llama.cpp",
        "NaN in a field that nobody reads",
        _TEXT,
        (*_HELLO, finish(timings={"predicted_per_second": float("nan")}), *_END[1:]),
        completion({"content": "Hello"}, usage=counts(), timings={"x": float("nan"), "y": float("inf")}),
    ),
    *(
        Quirk(backend, f"the content type {media_type!r}", _TEXT, _STREAM, _WHOLE, media_type=media_type)
        for backend, media_type in (
            ("KoboldCpp", "text/plain; charset=utf-8"),
            ("LM Studio", ""),
            ("SGLang", "TEXT/EVENT-STREAM"),
            ("TabbyAPI", "Application/JSON; Charset=UTF-8"),
        )
    ),
    Quirk("KoboldCpp", "HTTP status 201", _TEXT, _STREAM, _WHOLE, status=201),
    Quirk("Ollama", "a whole answer to a streaming request", _TEXT, (_WHOLE,), media_type="application/json"),
    Quirk(
        "MiniMax",
        "a stream for a request without streaming",
        _TEXT,
        (),
        _joined(*_STREAM),
        media_type="text/event-stream",
    ),
    # Errors within HTTP status 200.
    *(
        Quirk(backend, f"{name} within a stream", _error(text), (*_HELLO, piece, DONE))
        for backend, name, text, piece in (
            ("vLLM", "an error object", "out of memory", event({"error": {"message": "out of memory", "code": 500}})),
            ("Ollama", "an error text", "out of memory", event({"error": "out of memory"})),
            ("SGLang", "`object: error`", "out of memory", event({"object": "error", "message": "out of memory"})),
            ("FastChat", "a `detail`", "out of memory", event({"detail": "out of memory"})),
            (
                "LM Studio",
                "an event named error",
                "out of memory",
                b"event: error\n" + event({"message": "out of memory"}),
            ),
            ("llama.cpp", "a line `error:`", "out of memory", b'error: {"code":500,"message":"out of memory"}\n\n'),
            (
                "OpenRouter",
                "an error of the choice",
                "out of memory",
                chunk({"delta": {}, "finish_reason": "error", "error": {"code": 502, "message": "out of memory"}}),
            ),
            (
                "MiniMax",
                "a failed `base_resp`",
                "rate limit",
                event({"choices": None, "base_resp": {"status_code": 1002, "status_msg": "rate limit"}}),
            ),
        )
    ),
    *(
        Quirk(
            backend,
            f"{name} in place of an answer",
            Seen(end="error", error="out of memory"),
            (event(body),),
            json.dumps(body).encode(),
        )
        for backend, name, body in (
            ("vLLM", "an error object", {"error": {"message": "out of memory", "type": "ServerError", "code": 500}}),
            ("Ollama", "an error text", {"error": "out of memory"}),
            ("MiniMax", "a failed `base_resp`", {"base_resp": {"status_code": 1013, "status_msg": "out of memory"}}),
        )
    ),
    Quirk(
        "LM Studio",
        "a null error beside an answer",
        _TEXT,
        (*(chunk({"delta": {"content": text}, "finish_reason": None}, error=None) for text in ("Hel", "lo")), *_END),
        completion({"content": "Hello"}, usage=counts(), error=None, base_resp={"status_code": 0}),
    ),
    Quirk("vLLM", "a text that is no JSON in a stream", _error("malformed"), (*_HELLO, b"data: oops\n\n", DONE)),
    Quirk("nginx", "a web page in place of an answer", Seen(end="error"), (b"<html>502</html>",), b"<html>502</html>"),
    # Chunks without a choice.
    Quirk(
        "Azure",
        "a chunk without a choice at the beginning",
        _TEXT,
        (event({"choices": [], "prompt_filter_results": []}), *_STREAM),
    ),
    *(
        Quirk(
            backend,
            f"a usage chunk with {name} choices",
            _TEXT,
            (*_HELLO, finish(), piece, DONE),
        )
        for backend, name, piece in (
            ("LM Studio", "null", usage_chunk(counts(), choices=None)),
            ("TabbyAPI", "missing", event({"id": "c1", "usage": counts()})),
        )
    ),
    Quirk(
        "Mistral",
        "the usage in the chunk with the finish reason",
        _TEXT,
        (*_HELLO, finish(usage=counts()), DONE),
    ),
    Quirk(
        "vLLM",
        "the usage so far in each chunk",
        _TEXT,
        (
            chunk({"delta": {"content": "Hel"}, "finish_reason": None}, usage=counts(7, 1)),
            chunk({"delta": {"content": "lo"}, "finish_reason": None}, usage=counts(7, 2)),
            *_END,
        ),
    ),
    Quirk(
        "SGLang",
        "the role in each chunk",
        _TEXT,
        (*(delta(role="assistant", content=text) for text in ("Hel", "lo")), *_END),
    ),
    Quirk("MiniMax", "an empty role and null content", _TEXT, (delta(role="", content=None), *_HELLO[1:], *_END)),
    Quirk(
        "TabbyAPI",
        "chunks without id, object and model",
        _TEXT,
        (
            *(event({"choices": [{"delta": {"content": text}}]}) for text in ("Hel", "lo")),
            event({"choices": [{"delta": {}, "finish_reason": "stop"}]}),
            *_END[1:],
        ),
    ),
    Quirk(
        "llama.cpp",
        "a tool call that the end cuts off",
        Seen("Hello", end="error"),
        (*_HELLO, call(0, "add", '{"a": 1', "call_1"), DONE),
    ),
)
