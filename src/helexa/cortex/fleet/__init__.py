"""The nodes of a gateway: their state, polls, circuit breakers and client."""
