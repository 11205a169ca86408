"""The servers that `helexa up` runs on this machine, and the models of this machine."""
