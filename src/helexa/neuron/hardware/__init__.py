"""CPU, accelerators and memory of this machine."""
