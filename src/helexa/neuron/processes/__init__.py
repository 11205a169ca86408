"""Helpers for server and engine processes: parent-death watch, heartbeat, sandboxes, heap settings and file locks."""
