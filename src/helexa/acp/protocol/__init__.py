"""The agent's side of the Agent Client Protocol (ACP), which editors speak."""
