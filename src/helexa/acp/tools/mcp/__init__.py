"""Connects to MCP (Model Context Protocol) servers and offers their tools to the model."""
