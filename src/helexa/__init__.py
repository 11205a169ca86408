"""helexa: a self-hosted LLM serving stack (gateway, nodes and the tools around them)."""

__version__ = "0.1.0"
