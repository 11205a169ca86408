"""Page hashes: keys under which full KV pages are found again.

The hash of a page is H(hash of the previous page, tokens of the page), so it depends on every token up to the end of
the page. K and V of a position depend on the tokens up to that position only, so two pages with the same hash have the
same contents. The first hash of a sequence starts from a salt. The hash does not include the model: an engine process
serves one model, and the hashes end with the process.
"""

from array import array
from hashlib import blake2b

_BYTES = 16


def chain_of(salt: str) -> list[bytes]:
    """Return a hash chain without pages: one entry, from which the first page's hash is computed.

    Chains with different salts share no hashes.
    """
    return [blake2b(salt.encode(), digest_size=_BYTES).digest()]


def extend(chain: list[bytes], tokens: list[int], pages: int, page_size: int) -> None:
    """Extend `chain` to the first `pages` pages of `tokens`; `chain[i + 1]` is the hash of page i."""
    for start in range((len(chain) - 1) * page_size, pages * page_size, page_size):
        digest = blake2b(chain[-1], digest_size=_BYTES)
        digest.update(array("I", tokens[start : start + page_size]))
        chain.append(digest.digest())
