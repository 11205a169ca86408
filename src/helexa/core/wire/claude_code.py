"""The billing line that Claude Code sends before its system prompt."""

from typing import Any

# Claude Code sends this line for Anthropic. It is not part of the prompt, and it differs in every request: with it, no
# page of the prompt would be found in a prefix cache.
_BILLING_LINE = "x-anthropic-billing-header:"

_Content = str | list[dict[str, Any]] | None


def is_billing_line(text: str) -> bool:
    """Return whether `text` begins with the billing line of Claude Code."""
    return text.startswith(_BILLING_LINE)


def without_billing_line(content: _Content) -> _Content:
    """Return the content of a system message without the billing line."""
    if isinstance(content, str):
        return content.partition("\n")[2].lstrip("\n") if is_billing_line(content) else content
    # The line is in the first part. A router that forwards the request may have joined it with the prompt.
    if not content or content[0].get("type") != "text" or not isinstance(text := content[0].get("text"), str):
        return content
    return [content[0] | {"text": without_billing_line(text)}, *content[1:]]
