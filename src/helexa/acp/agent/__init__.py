"""The agent itself: rounds of asking a model and running the tools that it calls."""
