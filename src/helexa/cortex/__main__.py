"""`python -m helexa.cortex`: the same as the `cortex` command."""

from helexa.cortex.cli import main

if __name__ == "__main__":
    main()
