"""Page hashes: keys under which the page pool finds full KV pages with given contents, for prefix caching.

The hash of a page is computed from the hash of the previous page, the tokens of the page and the images to which these
tokens belong. It therefore depends on every token and image up to the end of the page. K and V of a position depend
only on these tokens and images. Two pages with the same hash therefore have the same contents. The hash chain of a
sequence starts from a salt, so sequences with different salts share no pages. The hash does not include the model,
because an engine process serves only one model.
"""

from array import array
from hashlib import blake2b
from typing import Protocol

_BYTES = 16


class ImageKeys(Protocol):
    """The images of a sequence."""

    def key(self, start: int, stop: int) -> bytes:
        """Return bytes that identify the image tokens from index `start` to `stop` (exclusive); else no bytes."""
        ...


def chain_of(salt: str) -> list[bytes]:
    """Return a new hash chain, whose only entry is the hash of `salt`. The hash of the first page is computed from it.

    Chains with different salts have no hash in common.
    """
    return [blake2b(salt.encode(), digest_size=_BYTES).digest()]


def extend(chain: list[bytes], tokens: list[int], pages: int, page_size: int, images: ImageKeys | None = None) -> None:
    """Append hashes to the hash chain of a sequence until the chain covers `pages` pages.

    `chain[0]` is the hash of the salt (see `chain_of`). Afterwards, `chain[i + 1]` is the hash of page i.

    Args:
        chain: hash chain of the sequence, which may already cover some pages.
        tokens: tokens of the sequence.
        pages: number of full pages from the start of the sequence whose hashes the chain must contain.
        page_size: number of tokens per page.
        images: the images of the sequence; None without images.
    """
    for start in range((len(chain) - 1) * page_size, pages * page_size, page_size):
        digest = blake2b(chain[-1], digest_size=_BYTES)
        digest.update(array("I", tokens[start : start + page_size]))
        if images is not None:
            digest.update(images.key(start, start + page_size))
        chain.append(digest.digest())
