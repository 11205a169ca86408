"""Run generation requests on a loaded model: inference, output events, constrained output, metrics and usage."""
