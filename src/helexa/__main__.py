"""The `helexa` command, also as `python -m helexa`."""

import gc
import os
import sys
from typing import NoReturn

# Number of new objects after which the garbage collector runs. With Python's default of 700, it would scan the imported
# modules 100 times, which takes a twentieth of the time of their import. With this number, it seldom runs before the
# engine loads, because a command that generates has about 70,000 objects at that time.
_OBJECTS = 100_000


def main() -> NoReturn:
    """Run the command line; see `helexa.cli.main`."""
    gc.set_threshold(_OBJECTS, 10, 10)
    # Without this variable, pydantic would read the metadata of all installed packages to find plugins, which helexa
    # does not use.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "true")
    try:
        from helexa.generation.early_start import start_engine_early

        start_engine_early(sys.argv[1:], os.environ)
        from helexa.cli import main
    except KeyboardInterrupt:  # the imports take a moment, in which a user may press Ctrl-C
        sys.exit(130)
    main()


if __name__ == "__main__":
    main()
