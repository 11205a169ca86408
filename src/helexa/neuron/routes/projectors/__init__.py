"""Output events as response bodies and stream chunks."""
