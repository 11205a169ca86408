"""Model kernels and their inputs: `choice` picks an implementation, `reference` is the plain-torch oracle."""
