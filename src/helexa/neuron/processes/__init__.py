"""Helpers for server and engine processes: parent-death watch, heartbeat, heap settings and file locks."""
