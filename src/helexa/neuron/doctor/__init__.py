"""`neuron doctor`: check this machine and the configuration, one module per subject."""
