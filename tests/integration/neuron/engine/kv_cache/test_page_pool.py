"""KV pages and their hashes: sharing, caching and eviction."""

import pytest

from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool, extend_chain, new_chain

A, B, C, D = b"a", b"b", b"c", b"d"


def cached_pages(pool: PagePool, *hashes: bytes) -> list[int]:
    """Take pages, register them with `hashes`, give them back, and return them."""
    pages = pool.take(len(hashes))
    for page, page_hash in zip(pages, hashes, strict=True):
        pool.register(page, page_hash)
    pool.give_back(pages)
    return pages


def test_page_pool_takes_the_free_pages_with_the_lowest_numbers_first() -> None:
    pool = PagePool(5, 4)
    assert pool.take(2) == [0, 1]
    assert pool.take(3) == [2, 3, 4]
    pool.give_back([2, 3, 4])
    pool.give_back([0, 1])
    assert pool.free == 5
    assert pool.take(5) == [0, 1, 2, 3, 4]


def test_registered_page_that_no_sequence_holds_matches_and_counts_as_free() -> None:
    pool = PagePool(4, 4)
    pages = cached_pages(pool, A, B)
    assert pool.free == 4
    assert pool.match([A, B, C]) == pages
    assert pool.match([B]) == [pages[1]]
    assert pool.match([C, A]) == []
    assert pool.count_held(pages) == 0
    pool.share(pages)
    assert (pool.free, pool.count_held(pages)) == (2, 2)
    pool.share(pages)
    pool.give_back(pages)
    assert (pool.free, pool.count_held(pages)) == (2, 2)
    pool.give_back(pages)
    assert pool.free == 4


def test_pool_takes_empty_pages_first_and_then_evicts_prefixes_from_their_ends() -> None:
    pool = PagePool(4, 4)
    first, second, third = cached_pages(pool, A, B, C)
    assert pool.take(1) == [3]
    assert pool.take(1) == [third]
    assert pool.match([A, B, C]) == [first, second]
    assert pool.take(1) == [second]
    assert pool.match([A, B, C]) == [first]


def test_least_recently_used_pages_are_evicted_first() -> None:
    pool = PagePool(4, 4)
    old = cached_pages(pool, A, B)
    new = cached_pages(pool, C, D)
    pool.share(old)
    pool.give_back(old)
    pool.take(2)
    assert pool.match([A, B]) == old
    assert pool.match([C]) == pool.match([D]) == []
    assert new != old


def test_page_that_a_sequence_shares_is_not_evicted() -> None:
    pool = PagePool(3, 4)
    pages = cached_pages(pool, A, B)
    pool.share(pages[:1])
    assert set(pool.take(2)).isdisjoint(pages[:1])
    with pytest.raises(AssertionError, match="0 free"):
        pool.take(1)


def test_second_page_registered_under_a_cached_hash_is_not_cached() -> None:
    pool = PagePool(3, 4)
    first, second = pool.take(2)
    pool.register(first, A)
    pool.register(second, A)
    assert pool.match([A]) == [first]
    pool.give_back([second])
    pool.give_back([first])
    assert sorted([*pool.take(2)]) == [1, 2], "the second page is not cached, so it is taken first"
    assert pool.match([A]) == [first]


def test_evicted_page_can_be_registered_with_another_hash() -> None:
    pool = PagePool(1, 4)
    cached_pages(pool, A)
    cached_pages(pool, B)
    assert pool.match([A]) == []
    assert pool.match([B]) == [0]


def test_giving_back_a_page_twice_raises_an_assertion_error() -> None:
    pool = PagePool(2, 4)
    pages = pool.take(1)
    pool.give_back(pages)
    with pytest.raises(AssertionError, match="twice"):
        pool.give_back(pages)


def hashes(tokens: list[int], salt: str = "", size: int = 4) -> list[bytes]:
    chain = new_chain(salt)
    extend_chain(chain, tokens, len(tokens) // size, size)
    return chain[1:]


def test_page_hash_depends_on_all_tokens_up_to_its_end() -> None:
    base = hashes([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    assert len(set(base)) == 3
    changed = hashes([1, 2, 3, 4, 5, 99, 7, 8, 9, 10, 11, 12])
    assert changed[0] == base[0]
    assert not set(changed[1:]) & set(base)
    assert not set(hashes([0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])) & set(base)


def test_hash_of_a_kv_page_depends_on_the_position_of_the_page_in_the_prompt() -> None:
    first, second = hashes([1, 2, 3, 4, 1, 2, 3, 4])
    assert first != second


def test_equal_tokens_with_different_salts_have_no_equal_page_hashes() -> None:
    tokens = list(range(12))
    chains = [hashes(tokens, salt) for salt in ("", "a", "b", "ab")]
    assert len({page_hash for chain in chains for page_hash in chain}) == 12
    assert hashes(tokens, "a") == hashes(tokens, "a")


def test_hash_chain_extended_page_by_page_equals_a_chain_computed_at_once() -> None:
    tokens = list(range(100_000, 100_012))
    chain = new_chain("")
    for pages in (1, 1, 2, 3):
        extend_chain(chain, tokens[: 4 * pages + 1], pages, 4)
        assert len(chain) == pages + 1
    assert chain[1:] == hashes(tokens)
    extend_chain(chain, tokens, 1, 4)
    assert chain[1:] == hashes(tokens)


def test_clear_drops_cached_pages_and_keeps_pages_that_sequences_hold() -> None:
    pool = PagePool(4, 16)
    held, cached = pool.take(1), pool.take(2)
    for page in (*held, *cached):
        pool.register(page, bytes([page]))
    pool.give_back(cached)
    pool.clear()
    assert pool.free == 3 and not pool.match([bytes([page]) for page in (*held, *cached)])
    pool.give_back(held)
    assert sorted(pool.take(4)) == [0, 1, 2, 3]
