"""Who may come in, what they may use, and how much."""
