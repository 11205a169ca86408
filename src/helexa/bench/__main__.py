"""`python -m helexa.bench`: the same as the `helexa-bench` command."""

from helexa.bench.cli import main

if __name__ == "__main__":
    main()
