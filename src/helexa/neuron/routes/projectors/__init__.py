"""Render output events as response bodies and stream chunks, with one projector per API format."""
