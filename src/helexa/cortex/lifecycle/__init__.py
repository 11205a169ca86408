"""Model management: on-demand loads, evictions that free memory, and the queue of requests that wait for loads."""
