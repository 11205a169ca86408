"""What goes wrong while a tool works, in words for the model."""


class ToolError(Exception):
    """A tool could not do what it was asked; the message is for the model and the user."""
