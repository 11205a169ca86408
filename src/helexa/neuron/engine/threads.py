"""How an engine's threads wait for one another; must be in the environment before torch is imported."""

# libgomp's threads spin before they sleep. Its default is long enough to starve the thread they wait for whenever
# another process wants the core (steps become ten times slower); sleeping at once costs a third of the speed.
ENVIRONMENT = {"GOMP_SPINCOUNT": "3000"}
