"""Projectors convert output events to response bodies and stream chunks. Each API format has one projector."""
