"""The library behind `import helexa`: text generation on a running server, or on an engine in this process."""
