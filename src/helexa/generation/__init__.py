"""The library behind `import helexa`: text generation on a running server, or on an engine that the library starts."""
