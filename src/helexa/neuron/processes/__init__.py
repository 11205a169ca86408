"""Processes of a node: death watch, heartbeat, sandboxes, heap, file locks."""
