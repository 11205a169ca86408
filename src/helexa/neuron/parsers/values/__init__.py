"""Values inside tool calls."""
