"""Implements the agent's side of the Agent Client Protocol (ACP), the JSON-RPC protocol between editor and agent."""
