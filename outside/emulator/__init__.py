"""Emulates third-party backends whose chat completions differ from OpenAI's specification."""
