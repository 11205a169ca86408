"""The kernels that compute models, in several implementations.

The module `interface` defines the interface of all implementations. The module `kernel_selection` selects an
implementation for a device. The package `reference` contains the implementation in plain torch. Tests compare the
other implementations with `reference`.
"""
