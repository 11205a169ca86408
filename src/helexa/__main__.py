"""`python -m helexa`: the same as the `helexa` command."""

from helexa.cli import main

if __name__ == "__main__":
    main()
