"""Classes for the request and response bodies of the public APIs."""

# Claude Code sends a line that begins with this text before its system prompt, for Anthropic. The line differs in every
# request. If the line stayed in the prompt, no page of the prompt would be found in a prefix cache.
BILLING_LINE = "x-anthropic-billing-header:"
