"""Plans what each step computes, and applies the results of steps to sequences."""
