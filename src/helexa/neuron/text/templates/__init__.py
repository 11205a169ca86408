"""Chat templates: loading, sandboxed rendering and message preparation."""
