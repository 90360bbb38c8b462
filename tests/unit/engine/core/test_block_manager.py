"""Blocks are shared only when full, computed and equal from the first token on, and never while someone writes them."""

import pytest

from engine.core.block_manager import BlockManager
from engine.core.request import Request
from engine.interface.protocol import SamplingParams


def make_request(tokens, salt=""):
    return Request("r", list(tokens), SamplingParams(max_tokens=1), cache_salt=salt)


@pytest.fixture
def blocks():
    return BlockManager(num_blocks=9, block_size=4)


def computed(blocks, tokens, salt=""):
    """Admit a request, and publish it as if its step were committed."""
    request = make_request(tokens, salt)
    assert blocks.admit(request)
    request.num_computed_tokens = request.num_tokens
    blocks.publish(request, request.num_tokens)
    return request


def test_block_0_is_never_handed_out(blocks):
    request = make_request(range(32))
    assert blocks.admit(request)
    assert sorted(request.block_ids) == list(range(1, 9))
    assert blocks.num_free == 0
    assert blocks.num_used == blocks.num_usable == 8


def test_equal_prefix_shares_full_blocks_only(blocks):
    first = computed(blocks, range(10))
    second = make_request([*range(10), 10, 11, 12])
    assert blocks.admit(second)
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    assert second.num_computed_tokens == 8
    blocks.check([first, second])


def test_the_last_token_of_a_fully_cached_prompt_is_computed_again(blocks):
    computed(blocks, range(8))
    again = make_request(range(8))
    assert blocks.admit(again)
    assert again.num_computed_tokens == 4


def test_blocks_that_are_not_published_are_never_found(blocks):
    assert blocks.admit(make_request(range(8)))
    other = make_request(range(8))
    assert blocks.admit(other)
    assert other.num_computed_tokens == 0


def test_only_blocks_that_are_full_are_published(blocks):
    first = make_request(range(8))
    assert blocks.admit(first)
    first.num_computed_tokens = 8
    blocks.publish(first, 7)
    second = make_request(range(9))
    assert blocks.admit(second)
    assert second.num_computed_tokens == 4


def test_equal_blocks_after_different_prefixes_are_different(blocks):
    computed(blocks, [1, 1, 1, 1, 5, 6, 7, 8])
    other = make_request([2, 2, 2, 2, 5, 6, 7, 8, 9])
    assert blocks.admit(other)
    assert other.num_computed_tokens == 0


def test_different_salts_never_share(blocks):
    computed(blocks, range(8), salt="one tenant")
    stranger = make_request(range(9), salt="another")
    assert blocks.admit(stranger)
    assert stranger.num_computed_tokens == 0


def test_freed_blocks_are_found_until_they_are_reused(blocks):
    first = computed(blocks, range(8))
    block_ids = first.block_ids
    blocks.free(first)
    assert blocks.num_free == 8
    second = make_request(range(9))
    assert blocks.admit(second)
    assert second.block_ids[:2] == block_ids
    blocks.check([second])
    blocks.free(second)
    filler = make_request([49] * 32)
    assert blocks.admit(filler)
    assert blocks.num_evictions == 2
    blocks.free(filler)
    third = make_request(range(9))
    assert blocks.admit(third)
    assert third.num_computed_tokens == 0


def test_the_least_recently_used_prefix_is_forgotten_first_and_its_tail_before_its_head(blocks):
    old = computed(blocks, [1] * 8)
    new = computed(blocks, [2] * 8)
    blocks.free(old)
    blocks.free(new)
    assert blocks.admit(make_request([3] * 20))  # 5 of 8 blocks: the 4 that were never used, and one more
    assert blocks.num_evictions == 1
    again = make_request([1] * 9)
    assert blocks.admit(again)
    assert again.num_computed_tokens == 4


def test_unpublished_blocks_are_reused_before_cached_ones(blocks):
    cached = computed(blocks, [1] * 24)
    partial = make_request([2] * 7)
    assert blocks.admit(partial)
    blocks.free(cached)
    blocks.free(partial)
    assert blocks.admit(make_request([3] * 8))
    assert blocks.num_evictions == 0


def test_what_does_not_fit_changes_nothing(blocks):
    holder = computed(blocks, range(12))
    blocks.free(holder)
    other = make_request([7] * 16)
    assert blocks.admit(other)
    hopeful = make_request([*range(12), *range(12)])  # 3 found blocks and 3 new ones, 4 free in all
    assert not blocks.admit(hopeful)
    assert hopeful.block_ids == []
    assert hopeful.num_computed_tokens == 0
    blocks.check([other])


def test_found_blocks_that_are_free_count_as_taken(blocks):
    blocks.free(computed(blocks, range(16)))
    other = make_request([7] * 16)
    assert blocks.admit(other)
    hopeful = make_request([*range(16), 1])  # the 4 free blocks are its own prefix: none is left for its end
    assert not blocks.admit(hopeful)
    blocks.check([other])


def test_reserved_blocks_stay_free(blocks):
    assert not blocks.admit(make_request(range(8)), num_reserved=7)
    assert blocks.admit(make_request(range(8)), num_reserved=6)
    assert blocks.num_free == 6


def test_two_requests_that_computed_the_same_block_keep_their_own(blocks):
    first, second = make_request(range(9)), make_request(range(9))
    for request in (first, second):
        assert blocks.admit(request)
        request.num_computed_tokens = 9
    blocks.publish(first, 9)
    blocks.publish(second, 9)
    assert not set(first.block_ids) & set(second.block_ids)
    third = make_request(range(9))
    assert blocks.admit(third)
    assert third.block_ids[:2] == first.block_ids[:2]
    blocks.free(second)
    blocks.check([first, third])


def test_without_prefix_caching_nothing_is_found_or_counted():
    blocks = BlockManager(num_blocks=9, block_size=4, enable_prefix_caching=False)
    computed(blocks, range(8))
    second = make_request(range(9))
    assert blocks.admit(second)
    assert second.num_computed_tokens == 0
    assert second.block_hashes == []
    assert blocks.num_queried_tokens == blocks.num_hit_tokens == 0


def test_lookups_and_hits_are_counted_in_tokens(blocks):
    computed(blocks, range(10))
    assert blocks.admit(make_request(range(13)))
    assert blocks.num_queried_tokens == 23
    assert blocks.num_hit_tokens == 8
