"""Local generation: the library behind `import helexa`, on a server that runs or on a private engine."""
