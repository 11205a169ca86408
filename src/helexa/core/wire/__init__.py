"""Classes for the request and response bodies of the public APIs."""

# Claude Code sends this line before its system prompt, for Anthropic. It is not part of the prompt, and it differs in
# every request: with it, no page of the prompt would be found in a prefix cache.
BILLING_LINE = "x-anthropic-billing-header:"
