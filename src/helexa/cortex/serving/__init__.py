"""The stages of a request: authorization, limits, budget, forwarding, settlement."""
