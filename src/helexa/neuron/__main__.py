"""`python -m helexa.neuron` is the `neuron` command."""

from helexa.neuron.cli import main

main()
