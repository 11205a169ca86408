"""Runs parts of the engine with the numpy backend in a process of tests, which otherwise use torch."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from helexa.neuron import tensors


@contextmanager
def numpy_tensors() -> Iterator[None]:
    """Use the numpy backend in the `with` block. Tensors of one backend must not be used with the other."""
    with np.errstate():  # the backend changes these settings
        tensors.use("numpy")
        try:
            yield
        finally:
            tensors.use("torch")
