"""Plans what each engine step computes, and applies the results of the step to the sequences."""
