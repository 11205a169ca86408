"""Processes of a node: parent-death watch, heartbeat, sandboxes, heap, file locks."""
