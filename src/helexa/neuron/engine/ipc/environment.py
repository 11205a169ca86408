"""What an engine needs in its environment before it imports torch, unless its owner has said otherwise."""

ENVIRONMENT = {
    # libgomp's threads spin before they sleep. Its default is long enough to starve the thread they wait for whenever
    # another process wants the core (steps became ten times slower); without any spin they take 1.4 to 1.7 times as
    # long.
    "GOMP_SPINCOUNT": "3000",
    # NVML's order, by which devices are chosen; CUDA's own puts the fastest first.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}
