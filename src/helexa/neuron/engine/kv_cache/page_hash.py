"""Page hashes: keys under which the page pool finds full KV pages again, for prefix reuse.

The hash of a page is H(hash of the previous page, tokens of the page), so it depends on every token up to the end of
the page. K and V of a position depend only on the tokens up to this position. Two pages with the same hash therefore
have the same contents. The hash chain of a sequence starts from a salt, so sequences with different salts share no
pages. The hash does not include the model, because an engine process serves only one model.
"""

from array import array
from hashlib import blake2b

_BYTES = 16


def chain_of(salt: str) -> list[bytes]:
    """Return a new hash chain without pages. Its one entry is the start value for the hash of the first page.

    Chains with different salts have no hash in common.
    """
    return [blake2b(salt.encode(), digest_size=_BYTES).digest()]


def extend(chain: list[bytes], tokens: list[int], pages: int, page_size: int) -> None:
    """Append hashes to `chain` until it covers the first `pages` pages of `tokens`.

    Afterwards `chain[i + 1]` is the hash of page i.
    """
    for start in range((len(chain) - 1) * page_size, pages * page_size, page_size):
        digest = blake2b(chain[-1], digest_size=_BYTES)
        digest.update(array("I", tokens[start : start + page_size]))
        chain.append(digest.digest())
