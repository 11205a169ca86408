"""Entry point of `python -m helexa.cortex`, which runs the `cortex` command."""

from helexa.cortex.cli import main

if __name__ == "__main__":
    main()
