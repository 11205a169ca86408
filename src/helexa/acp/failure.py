"""The error that tools raise."""


class ToolError(Exception):
    """A tool call failed. The error message is shown to the model and the user."""
