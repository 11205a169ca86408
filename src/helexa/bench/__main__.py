"""Entry point of `python -m helexa.bench`, which runs the `helexa-bench` command."""

from helexa.bench.cli import main

if __name__ == "__main__":
    main()
