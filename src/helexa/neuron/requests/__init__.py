"""Run generation requests: prompts, constraints, answers, records, metrics."""
