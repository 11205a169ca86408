"""Try to exceed the token caps of API keys with random requests, and report the charged tokens, as JSON lines.

usage: python perf/attack/budget_cap.py [--seeds 10] [--requests 2000] [--parallel 16]

The script runs the test `tests/unit/cortex/budgets/test_budget_property.py` with more requests. The test starts a
gateway with capped API keys in front of a node and a third-party backend. Both servers use as many tokens as the
forwarded request permits. For each seed, the script prints a line with the response statuses (0: the client closed the
connection), the number of ledger entries, and the charged tokens. The script fails in these cases:

* a request is charged more tokens than the gateway reserved for it
* a node uses more tokens for a request than the gateway reserved
* a key exceeds its cap
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/unit"))

from cortex.budgets.budget_attack import random_attack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--parallel", type=int, default=16)
    arguments = parser.parse_args()
    for seed in range(arguments.seeds):
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            attack = asyncio.run(random_attack(Path(folder), seed, arguments.requests, arguments.parallel))
        line = {
            "seed": seed,
            "statuses": dict(sorted(attack.statuses.items())),
            "entries": attack.entries_checked,
            "charged": attack.charged,
            "over": 0,
            "seconds": round(time.perf_counter() - began, 1),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
