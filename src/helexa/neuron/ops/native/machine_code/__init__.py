"""The machine code of the C kernels: prebuilt in a platform wheel, or compiled on first use."""
