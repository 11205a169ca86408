"""Chat templates: load templates, prepare messages for them, and render them in a sandbox."""
