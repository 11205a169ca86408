"""Run requests on a loaded model: inference, output events, output constraints and request records."""
