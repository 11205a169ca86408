"""The servers that `helexa up` runs on this machine."""
