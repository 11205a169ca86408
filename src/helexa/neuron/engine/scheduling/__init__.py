"""Plans engine steps, and applies their results to the sequences."""
