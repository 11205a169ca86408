"""The one choice point for kernels; `reference` is the plain-torch oracle."""
