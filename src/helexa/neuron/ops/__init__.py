"""The kernels of models in several implementations.

`protocol` defines the interface, `choice` selects an implementation, and `reference` is the plain-torch implementation.
"""
