"""The library behind `import helexa`."""
