"""How an engine's threads wait for one another; must be in the environment before torch is imported."""

# libgomp's threads spin before they sleep. Its default is long enough to starve the thread they wait for whenever
# another process wants the core (steps became ten times slower); without any spin they take 1.4 to 1.7 times as long.
ENVIRONMENT = {"GOMP_SPINCOUNT": "3000"}
