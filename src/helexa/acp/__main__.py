"""Runs the `helexa-acp` command for `python -m helexa.acp`."""

from helexa.acp.cli import main

main()
