"""The protocol between the server process and an engine process, without torch."""

# Environment variables of engine processes. This module imports nothing, because commands import it before they start
# an engine process.
ENVIRONMENT = {
    # These are defaults: variables that the user has set take precedence. The variables must be set before torch or
    # numpy is imported.
    # libgomp's threads spin before they sleep. If another process uses a core, threads that spin as long as libgomp's
    # default count can starve the thread for which they wait. Steps then took ten times as long. Without any spinning,
    # steps took 1.4 to 1.7 times as long.
    "GOMP_SPINCOUNT": "3000",
    # The engine does not multiply matrices with numpy. OpenBLAS would reserve memory for each of its threads.
    "OPENBLAS_NUM_THREADS": "1",
    # The option `device` counts GPUs in NVML's order. CUDA's default order, fastest device first, would differ.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}
