"""Render output events as response bodies and stream chunks of each API format."""
