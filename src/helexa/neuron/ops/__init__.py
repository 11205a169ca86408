"""The kernels that compute models, in several implementations.

The module `interface` defines the interface of all implementations. The module `kernel_selection` selects an
implementation for a device. The package `reference` has the one in plain torch, with which tests compare the others.
"""
