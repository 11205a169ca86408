"""Program that runs a gateway's ledger under load until it is killed, and writes finished settlements to a journal.

Arguments: database URL, cap of the key in tokens, path of the journal, random seed.
"""

import asyncio
import os
import random
import sys

from helexa.core.errors import ApiError
from helexa.cortex.access.keys import Principal
from helexa.cortex.ledger.ledger import Ledger
from helexa.cortex.ledger.storage import open_database


async def main(url: str, cap: int, journal: int, seed: str) -> None:
    rng = random.Random(int(seed))
    database = await open_database(url)
    await database.migrate()
    ledger = Ledger(database, dead_after_secs=1.0)
    await ledger.start()
    key = Principal("account", "key", hard_cap=cap)

    async def send_requests() -> None:
        while True:
            request, tokens = f"{rng.getrandbits(64):x}", rng.randint(50, 200)
            try:
                reservation = await ledger.reserve(key, request, "Org/M", tokens)
            except ApiError as error:
                if error.status == 503:  # on a slow machine this gateway may be marked dead; it recovers
                    continue
                assert error.code == "insufficient_quota", error
                os.write(journal, b"refused\n")
                await asyncio.sleep(0.005)
                continue
            await asyncio.sleep(rng.random() * 0.003)
            used = rng.randint(1, tokens)
            await reservation.settle(used, 0)
            os.write(journal, f"settled {request} {used}\nworking {seed}\n".encode())

    await asyncio.gather(*(send_requests() for _ in range(8)))


if __name__ == "__main__":
    url, cap, path, seed = sys.argv[1:]
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    asyncio.run(main(url, int(cap), file, seed))
