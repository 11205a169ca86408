"""The library behind `import helexa`: text generation on a running server or on a private engine."""
