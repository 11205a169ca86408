"""Send responses to clients, as streams or as complete bodies."""
