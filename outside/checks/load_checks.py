"""Checks of load generators. Each command must exit with status 0 and report no failed request."""

import os
import re
import subprocess
from pathlib import Path

from checking import MODEL, SETTINGS, URL, report

FOLDER = Path(os.environ["HOME"])


def main() -> None:
    """Run each command line in the program's settings, and report each as one check."""
    values = {"url": URL, "model": MODEL, "tokenizer": os.environ["OUTSIDE_TOKENIZER"], "folder": str(FOLDER)}
    for name, command in SETTINGS["commands"].items():
        words = [word.format_map(values) for word in command]
        words[0] = str(Path(os.environ["OUTSIDE_ENVIRONMENT"]) / words[0])
        path = f"{Path(words[0]).parent}:{os.environ['PATH']}"
        ended = subprocess.run(
            words,
            cwd=FOLDER,
            env=os.environ | {"PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        print(ended.stdout, flush=True)
        wanted = re.search(SETTINGS["expect"], ended.stdout)
        if ended.returncode == 0 and wanted:
            report(name, "passed")
        else:
            report(name, "failed", f"ended with {ended.returncode}: {ended.stdout[-300:].strip()}")


main()
