"""`python -m helexa.acp` is the `helexa-acp` command."""

from helexa.acp.cli import main

main()
