"""The servers and models of `helexa up` on this machine."""
