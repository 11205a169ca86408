"""Default environment variables of an engine process. Variables that the user has set take precedence.

The variables must be set before torch is imported.
"""

ENVIRONMENT = {
    # libgomp's threads spin before they sleep. With libgomp's default count, spinning threads starve the thread for
    # which they wait if another process uses a core: steps then took ten times as long. Without spinning, steps took
    # 1.4 to 1.7 times as long.
    "GOMP_SPINCOUNT": "3000",
    # The option `device` counts GPUs in NVML's order. CUDA's default order, fastest device first, would differ.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}
