"""The benchmark package: measures each build on each target, stores and compares the results, and serves them."""
