"""Environment variables of an engine process, set before torch is imported unless the user has set them."""

ENVIRONMENT = {
    # libgomp's threads spin before they sleep. With the default count, spinning threads starve the thread that they
    # wait for if another process uses the core: steps became ten times slower. Without spinning, steps take 1.4 to 1.7
    # times as long.
    "GOMP_SPINCOUNT": "3000",
    # Devices are chosen in NVML's order. CUDA's default order puts the fastest device first.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}
