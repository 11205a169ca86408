"""The error that tools raise."""


class ToolError(Exception):
    """A tool call failed; the message is for the model and the user."""
