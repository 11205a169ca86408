"""Strategies for chunks of a backend whose fields may have any type."""

from hypothesis import strategies as st

ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=4), values, max_size=3),
    max_leaves=6,
)


FUNCTION = st.fixed_dictionaries({}, optional={"name": ANY, "arguments": ANY})
CALL = st.fixed_dictionaries({}, optional={"index": ANY, "id": ANY, "function": FUNCTION | ANY})
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "thinking", "image_url"])}, optional={"text": ANY, "thinking": ANY}
)
DELTA = st.fixed_dictionaries(
    {},
    optional={
        "role": ANY,
        "content": st.lists(PART, max_size=2) | ANY,
        "reasoning": ANY,
        "thinking": ANY,
        "tool_calls": st.lists(CALL, max_size=2) | CALL | ANY,
        "function_call": FUNCTION | ANY,
    },
)
CHOICE = st.fixed_dictionaries(
    {},
    optional={
        "index": st.integers(0, 2) | ANY,
        "delta": DELTA | ANY,
        "message": DELTA | ANY,
        "text": ANY,
        "finish_reason": st.sampled_from(["stop", "length", "", "error"]) | ANY,
        "usage": ANY,
        "error": ANY,
    },
)
USAGE = st.fixed_dictionaries({}, optional={"prompt_tokens": ANY, "completion_tokens": ANY, "input_tokens": ANY})
CHUNK = st.fixed_dictionaries(
    {},
    optional={
        "id": ANY,
        "choices": st.lists(CHOICE | ANY, max_size=3) | ANY,
        "usage": USAGE | ANY,
        "timings": st.fixed_dictionaries({"prompt_n": ANY}, optional={"cache_n": ANY, "predicted_n": ANY}),
        "error": ANY,
        "object": st.sampled_from(["error", "chat.completion.chunk"]) | ANY,
        "base_resp": st.fixed_dictionaries({"status_code": ANY}) | ANY,
        "detail": ANY,
        "x_groq": ANY,
    },
)
