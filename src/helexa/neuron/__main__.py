"""Run the `neuron` command with `python -m helexa.neuron`."""

from helexa.neuron.cli import main

main()
