"""The command `neuron doctor`: checks this machine and the configuration."""
