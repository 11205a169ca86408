"""A request on a loaded model: inference, output events, constraints, records."""
