"""`neuron doctor`: what was found on this machine, in words, one file per thing that is looked at."""
