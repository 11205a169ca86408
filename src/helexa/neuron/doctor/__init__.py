"""The command `neuron doctor`: checks this machine and the node's configuration. Each module checks one subject."""
