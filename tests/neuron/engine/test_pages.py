"""Pages and their hashes: what is shared, what is kept, what is evicted."""

import pytest

from helexa.neuron.engine.kv_cache.page_hash import chain_of, extend
from helexa.neuron.engine.kv_cache.page_pool import PagePool

A, B, C, D = b"a", b"b", b"c", b"d"


def kept(pool: PagePool, *hashes: bytes) -> list[int]:
    """Pages that were registered and given back."""
    pages = pool.take(len(hashes))
    for page, page_hash in zip(pages, hashes, strict=True):
        pool.register(page, page_hash)
    pool.give_back(pages)
    return pages


def test_pages_come_in_ascending_order_and_come_back() -> None:
    pool = PagePool(5, 4)
    assert pool.take(2) == [0, 1]
    assert pool.take(3) == [2, 3, 4]
    pool.give_back([2, 3, 4])
    pool.give_back([0, 1])
    assert pool.free == 5
    assert pool.take(5) == [0, 1, 2, 3, 4]


def test_a_registered_page_is_found_again_and_still_counts_as_free() -> None:
    pool = PagePool(4, 4)
    pages = kept(pool, A, B)
    assert pool.free == 4
    assert pool.match([A, B, C]) == pages
    assert pool.match([B]) == [pages[1]]
    assert pool.match([C, A]) == []
    assert pool.held(pages) == 0
    pool.share(pages)
    assert (pool.free, pool.held(pages)) == (2, 2)
    pool.share(pages)
    pool.give_back(pages)
    assert (pool.free, pool.held(pages)) == (2, 2)
    pool.give_back(pages)
    assert pool.free == 4


def test_empty_pages_go_before_kept_ones_and_tails_before_heads() -> None:
    pool = PagePool(4, 4)
    first, second, third = kept(pool, A, B, C)
    assert pool.take(1) == [3]
    assert pool.take(1) == [third]
    assert pool.match([A, B, C]) == [first, second]
    assert pool.take(1) == [second]
    assert pool.match([A, B, C]) == [first]


def test_the_least_recently_used_are_evicted_first() -> None:
    pool = PagePool(4, 4)
    old = kept(pool, A, B)
    new = kept(pool, C, D)
    pool.share(old)
    pool.give_back(old)
    pool.take(2)
    assert pool.match([A, B]) == old
    assert pool.match([C]) == pool.match([D]) == []
    assert new != old


def test_a_shared_page_is_never_evicted() -> None:
    pool = PagePool(3, 4)
    pages = kept(pool, A, B)
    pool.share(pages[:1])
    assert set(pool.take(2)).isdisjoint(pages[:1])
    with pytest.raises(AssertionError, match="0 free"):
        pool.take(1)


def test_of_two_pages_with_the_same_content_the_first_is_kept() -> None:
    pool = PagePool(3, 4)
    first, second = pool.take(2)
    pool.register(first, A)
    pool.register(second, A)
    assert pool.match([A]) == [first]
    pool.give_back([second])
    pool.give_back([first])
    assert sorted([*pool.take(2)]) == [1, 2], "the second was empty"
    assert pool.match([A]) == [first]


def test_an_evicted_page_can_be_registered_anew() -> None:
    pool = PagePool(1, 4)
    kept(pool, A)
    kept(pool, B)
    assert pool.match([A]) == []
    assert pool.match([B]) == [0]


def test_giving_back_twice_is_noticed() -> None:
    pool = PagePool(2, 4)
    pages = pool.take(1)
    pool.give_back(pages)
    with pytest.raises(AssertionError, match="twice"):
        pool.give_back(pages)


def hashes(tokens: list[int], salt: str = "", size: int = 4) -> list[bytes]:
    chain = chain_of(salt)
    extend(chain, tokens, len(tokens) // size, size)
    return chain[1:]


def test_a_hash_depends_on_every_token_up_to_the_end_of_its_page() -> None:
    base = hashes([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    assert len(set(base)) == 3
    changed = hashes([1, 2, 3, 4, 5, 99, 7, 8, 9, 10, 11, 12])
    assert changed[0] == base[0]
    assert not set(changed[1:]) & set(base)
    assert not set(hashes([0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])) & set(base)


def test_a_hash_depends_on_where_its_page_begins() -> None:
    first, second = hashes([1, 2, 3, 4, 1, 2, 3, 4])
    assert first != second


def test_chains_of_different_salts_never_meet() -> None:
    tokens = list(range(12))
    chains = [hashes(tokens, salt) for salt in ("", "a", "b", "ab")]
    assert len({page_hash for chain in chains for page_hash in chain}) == 12
    assert hashes(tokens, "a") == hashes(tokens, "a")


def test_a_chain_grows_to_what_it_would_be_at_once() -> None:
    tokens = list(range(100_000, 100_012))
    chain = chain_of("")
    for pages in (1, 1, 2, 3):
        extend(chain, tokens[: 4 * pages + 1], pages, 4)
        assert len(chain) == pages + 1
    assert chain[1:] == hashes(tokens)
    extend(chain, tokens, 1, 4)
    assert chain[1:] == hashes(tokens)
