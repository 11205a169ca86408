"""The kernels that compute models, in several implementations.

The module `protocol` defines the interface of all implementations. The module `choice` selects an implementation for a
device. The package `reference` contains the implementation in plain torch, with which tests compare the others.
"""
