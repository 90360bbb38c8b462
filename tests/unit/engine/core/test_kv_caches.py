"""Blocks are shared only when full, computed and equal from the first token on, and never while someone writes them."""

import pytest

from engine.core.kv_caches import KvCaches
from engine.core.page_pool import PagePool
from engine.core.request import Request
from engine.interface.config import CacheGroup, SchedulerConfig
from engine.interface.protocol import SamplingParams


def make_request(tokens, salt=""):
    return Request("r", list(tokens), SamplingParams(max_tokens=1), cache_salt=salt)


def make_kv(*groups, num_pages=9, block_size=4, **changes):
    config = SchedulerConfig(
        num_pages=num_pages, block_size=block_size, groups=groups, max_num_seqs=4, max_num_batched_tokens=64,
        max_model_len=256, **changes,
    )  # fmt: skip
    return KvCaches(config)


@pytest.fixture
def kv():
    return make_kv()


def commit(kv, request, num_tokens):
    """Commit the request's first tokens, as if their rows had ended."""
    request.num_computed_tokens = num_tokens
    if num_tokens >= request.next_due_tokens:
        kv.commit_row(request, num_tokens)


def begin_row(kv, request, end):
    """Take a row's blocks."""
    return kv.begin_row(request, end, kv.begin_step(), num_reserved=0)


def check(kv, requests):
    kv.check({request: request.num_computed_tokens for request in requests})


def computed(kv, tokens, salt=""):
    """Admit a request, and publish it as if its step were committed."""
    request = make_request(tokens, salt)
    assert kv.admit(request)
    commit(kv, request, request.num_tokens)
    return request


def blocks_of(request, group=0):
    return request.tables[group].blocks


def test_block_0_is_never_handed_out(kv):
    request = make_request(range(32))
    assert kv.admit(request)
    assert sorted(blocks_of(request)) == list(range(1, 9))
    assert kv.pool.num_free == 0
    assert kv.pool.num_used == kv.pool.num_usable == 8


def test_equal_prefix_shares_full_blocks_only(kv):
    first = computed(kv, range(10))
    second = make_request([*range(10), 10, 11, 12])
    assert kv.admit(second)
    assert blocks_of(second)[:2] == blocks_of(first)[:2]
    assert blocks_of(second)[2] != blocks_of(first)[2]
    assert second.num_computed_tokens == 8
    check(kv, [first, second])


def test_the_last_token_of_a_fully_cached_prompt_is_computed_again(kv):
    computed(kv, range(8))
    again = make_request(range(8))
    assert kv.admit(again)
    assert again.num_computed_tokens == 4


def test_blocks_that_are_not_published_are_never_found(kv):
    assert kv.admit(make_request(range(8)))
    other = make_request(range(8))
    assert kv.admit(other)
    assert other.num_computed_tokens == 0


def test_only_blocks_that_are_full_are_published(kv):
    first = make_request(range(8))
    assert kv.admit(first)
    commit(kv, first, 7)
    second = make_request(range(9))
    assert kv.admit(second)
    assert second.num_computed_tokens == 4


def test_equal_blocks_after_different_prefixes_are_different(kv):
    computed(kv, [1, 1, 1, 1, 5, 6, 7, 8])
    other = make_request([2, 2, 2, 2, 5, 6, 7, 8, 9])
    assert kv.admit(other)
    assert other.num_computed_tokens == 0


def test_different_salts_never_share(kv):
    computed(kv, range(8), salt="one tenant")
    stranger = make_request(range(9), salt="another")
    assert kv.admit(stranger)
    assert stranger.num_computed_tokens == 0


def test_freed_blocks_are_found_until_they_are_reused(kv):
    first = computed(kv, range(8))
    held = blocks_of(first).copy()
    kv.free(first)
    assert kv.pool.num_free == 8
    second = make_request(range(9))
    assert kv.admit(second)
    assert blocks_of(second)[:2] == held
    check(kv, [second])
    kv.free(second)
    filler = make_request([49] * 32)
    assert kv.admit(filler)
    assert kv.pool.num_evictions == [2]
    kv.free(filler)
    third = make_request(range(9))
    assert kv.admit(third)
    assert third.num_computed_tokens == 0


def test_the_least_recently_used_prefix_is_forgotten_first_and_its_tail_before_its_head(kv):
    old = computed(kv, [1] * 8)
    new = computed(kv, [2] * 8)
    kv.free(old)
    kv.free(new)
    assert kv.admit(make_request([3] * 20))  # 5 of 8 blocks: the 4 that were never used, and one more
    assert kv.pool.num_evictions == [1]
    again = make_request([1] * 9)
    assert kv.admit(again)
    assert again.num_computed_tokens == 4


def test_unpublished_blocks_are_reused_before_cached_ones(kv):
    cached = computed(kv, [1] * 24)
    partial = make_request([2] * 7)
    assert kv.admit(partial)
    kv.free(cached)
    kv.free(partial)
    assert kv.admit(make_request([3] * 8))
    assert kv.pool.num_evictions == [0]


def test_what_does_not_fit_changes_nothing(kv):
    holder = computed(kv, range(12))
    kv.free(holder)
    other = make_request([7] * 16)
    assert kv.admit(other)
    hopeful = make_request([*range(12), *range(12)])  # 3 found blocks and 3 new ones, 4 free in all
    assert not kv.admit(hopeful)
    assert hopeful.tables == []
    assert hopeful.num_computed_tokens == 0
    check(kv, [other])


def test_found_blocks_that_are_free_count_as_taken(kv):
    kv.free(computed(kv, range(16)))
    other = make_request([7] * 16)
    assert kv.admit(other)
    hopeful = make_request([*range(16), 1])  # the 4 free blocks are its own prefix: none is left for its end
    assert not kv.admit(hopeful)
    check(kv, [other])


def test_reserved_blocks_stay_free(kv):
    assert not kv.admit(make_request(range(8)), num_reserved=7)
    assert kv.admit(make_request(range(8)), num_reserved=6)
    assert kv.pool.num_free == 6


def test_two_requests_that_computed_the_same_block_keep_their_own(kv):
    first, second = make_request(range(9)), make_request(range(9))
    for request in (first, second):
        assert kv.admit(request)
    commit(kv, first, 9)
    commit(kv, second, 9)
    assert not set(blocks_of(first)) & set(blocks_of(second))
    third = make_request(range(9))
    assert kv.admit(third)
    assert blocks_of(third)[:2] == blocks_of(first)[:2]
    kv.free(second)
    check(kv, [first, third])


def test_without_prefix_caching_nothing_is_found_or_counted():
    kv = make_kv(enable_prefix_caching=False)
    computed(kv, range(8))
    second = make_request(range(9))
    assert kv.admit(second)
    assert second.num_computed_tokens == 0
    assert second.block_hashes == []
    assert kv.num_queried_tokens == kv.num_hit_tokens == 0


def test_lookups_and_hits_are_counted_in_tokens(kv):
    computed(kv, range(10))
    assert kv.admit(make_request(range(13)))
    assert kv.num_queried_tokens == 23
    assert kv.num_hit_tokens == 8


def test_a_block_of_several_pages_is_held_and_evicted_whole_and_listed_by_table():
    kv = make_kv(CacheGroup("full", 8, pages_per_block=3), num_pages=10)
    first = make_request(range(16))
    assert kv.admit(first)
    assert kv.pool.num_free == 3
    assert begin_row(kv, first, 16) == [(0, 0, [1, 4]), (1, 0, [2, 5]), (2, 0, [3, 6])]
    assert begin_row(kv, first, 16) == []
    commit(kv, first, 16)
    check(kv, [first])
    kv.free(first)
    assert kv.pool.num_free == 9
    second = computed(kv, [9] * 16)
    assert kv.pool.num_evictions == [1]
    check(kv, [second])
    again = make_request(range(16))
    assert not kv.admit(again)
    kv.free(second)
    assert kv.admit(again)
    assert again.num_computed_tokens == 8
    check(kv, [again])


def test_a_hit_is_what_every_group_has():
    kv = make_kv(CacheGroup("full", 8), CacheGroup("full", 12), num_pages=30)
    first = computed(kv, range(60))
    assert begin_row(kv, first, 60) == [(0, 0, [1, 2, 3, 4, 5, 6, 7, 8]), (1, 0, [9, 10, 11, 12, 13])]
    second = make_request([*range(60), 7])
    assert kv.admit(second)
    assert second.num_computed_tokens == 48
    assert blocks_of(second)[:6] == blocks_of(first)[:6]
    assert blocks_of(second, 1)[:4] == blocks_of(first, 1)[:4]
    check(kv, [first, second])
    kv.free(first)
    kv.free(second)
    third = make_request(range(40))
    assert kv.admit(third)
    assert third.num_computed_tokens == 24
    check(kv, [third])


@pytest.mark.parametrize(("groups", "longest"), [
    ((), 32), ((CacheGroup("full", 8, pages_per_block=3),), 16), ((CacheGroup("full", 8), CacheGroup("full", 4)), 20),
])  # fmt: skip
def test_the_pool_limits_a_request(groups, longest):
    assert make_kv(*groups).max_num_tokens == longest


def test_a_row_ends_where_pages_or_the_reserve_end():
    kv = make_kv(CacheGroup("full", 8), CacheGroup("full", 4))
    request = make_request(range(8))
    assert kv.admit(request)
    assert kv.pool.num_free == 5
    assert kv.fit(request, 100, num_reserved=0) == 20
    assert kv.fit(request, 100, num_reserved=2) == 16
    assert kv.fit(request, 10, num_reserved=4) == 8
    assert kv.num_missing(request, 9) == 2
    assert kv.has_room(request)
    request.num_computed_tokens = 8
    assert kv.admit(make_request(range(8)), num_reserved=1)
    assert kv.has_room(request)
    kv.pool.take(1)
    assert not kv.has_room(request)


WINDOW = CacheGroup("window", 4, window=6)


def begin(kv, request, end):
    """Plan and commit a row."""
    added = begin_row(kv, request, end)
    commit(kv, request, end)
    return added


def run(kv, tokens):
    """Admit a request and compute its tokens, in rows of four."""
    request = make_request(tokens)
    assert kv.admit(request)
    while request.num_computed_tokens < request.num_tokens:
        begin(kv, request, min(request.num_computed_tokens + 4, request.num_tokens))
    return request


def test_blocks_that_left_the_window_are_given_back_and_stay_findable():
    kv = make_kv(WINDOW, num_pages=9)
    request = make_request(range(24))
    assert kv.admit(request)
    assert kv.pool.num_used == 0, "blocks of windows are taken as rows come"
    assert begin(kv, request, 8) == [(0, 0, [1, 2])]
    assert request.tables[0].first == 0
    assert begin(kv, request, 16) == [(0, 2, [3, 4])]
    assert request.tables[0].first == 2  # token 16 reads tokens 11 to 16
    assert kv.pool.num_used == 2
    assert len(kv.pool.published) == 4
    check(kv, [request])
    kv.free(request)
    again = make_request(range(13))
    assert kv.admit(again)
    assert again.num_computed_tokens == 12
    assert (again.tables[0].first, blocks_of(again)) == (1, [2, 3])
    assert begin_row(kv, again, 13) == [(0, 1, [2, 3, 5])]
    check(kv, [again])


def test_a_hit_needs_the_whole_window_and_no_more():
    kv = make_kv(CacheGroup("full", 4), WINDOW, num_pages=40)
    kv.free(run(kv, range(32)))
    for lost, longest in ((7, 28), (5, 20), (3, 12), (2, 8), (1, 4)):
        key = make_request(range(33))
        key.extend_hashes(32, unit=kv.layout.unit)
        block = kv.pool.find(1, key.block_hashes[lost])
        kv.pool.expel(1, key.block_hashes[lost])
        assert block is not None
        hit = kv._finder.find(make_request(range(33)))
        assert hit.num_tokens == longest
        assert hit.num_full_tokens == 32
        assert len(hit.blocks[0]) == longest // 4


def test_blocks_of_a_chunk_stay_until_its_last_token_is_committed():
    kv = make_kv(CacheGroup("full", 4), CacheGroup("window", 4, chunk=10), num_pages=30)
    request = make_request(range(24))
    assert kv.admit(request)
    firsts = []
    for end in (8, 9, 10, 16, 19, 20, 24):
        begin(kv, request, end)
        firsts.append(request.tables[1].first)
    assert firsts == [0, 0, 2, 2, 2, 5, 5]
    check(kv, [request])
    kv.free(request)
    for num_tokens, columns in ((21, []), (17, [2, 3]), (13, [2]), (9, [0, 1])):
        again = make_request(range(num_tokens))
        assert kv.admit(again)
        assert again.num_computed_tokens == num_tokens - 1
        assert blocks_of(again, 1) == [kv.pool.find(1, request.block_hashes[column]) for column in columns]
        check(kv, [again])
        kv.free(again)


@pytest.mark.parametrize("reach", [{"window": 6}, {"window": 1}, {"chunk": 10}, {"chunk": 3}, {"chunk": 8}])
def test_a_block_is_kept_up_to_the_last_row_that_reads_it(reach):
    (group,) = make_kv(CacheGroup("window", 4, **reach)).layout.groups
    for column in range(9):
        starts = [start for start in range(100) if group.first_block(start) <= column]
        assert starts == list(range(group.last_start(column) + 1))


def test_window_blocks_before_a_mark_are_kept_longer():
    kv = make_kv(WINDOW, num_pages=30)
    first = run(kv, range(12))
    begin(kv, first, 12)
    for token_id in range(16):  # an answer
        first.output_token_ids.append(token_id)
        begin(kv, first, 12 + token_id)
    kv.free(first)
    filler = make_request([49] * 104)
    assert kv.admit(filler)
    begin(kv, filler, 104)  # takes 26 of 29 pages: 23 were blank
    kv.free(filler)
    assert kv._finder.find(make_request([*range(12), 40])).num_tokens == 8, "the mark of its prompt"


def test_admission_asks_for_the_window_alone():
    kv = make_kv(WINDOW, num_pages=6)
    assert kv.max_num_tokens == 256
    request = make_request(range(200))
    assert kv.admit(request)
    assert kv.fit(request, 64, num_reserved=0) == 20
    assert kv.fit(request, 64, num_reserved=2) == 12
    assert not kv.admit(make_request(range(200)), num_reserved=2)
    assert kv.admit(make_request(range(8)), num_reserved=2)


def test_pages_are_zeroed_when_they_are_lent_to_another_kind():
    kv = make_kv(CacheGroup("full", 4, 2), WINDOW, num_pages=10, enable_prefix_caching=False)
    first = run(kv, range(9))
    assert kv.pool.dirty == []
    pages = {page for table in first.tables for block in table.blocks for page in kv.pool.pages(block)}
    assert len(pages) == 8
    kv.free(first)
    second = run(kv, range(4))
    taken = {page for table in second.tables for block in table.blocks for page in kv.pool.pages(block)}
    assert set(kv.pool.dirty) <= taken
    assert kv.pool.dirty


def test_blocks_that_left_a_window_are_tainted_with_their_request():
    kv = make_kv(WINDOW, num_pages=20)
    request = run(kv, range(24))
    other = make_request(range(13))
    assert kv.admit(other)
    kv.taint([request])
    assert not kv.pool.published
    left = set(kv.pool.dirty)
    assert len(left) == 2  # of four blocks that left, two are the other's
    check(kv, [request, other])
    kv.free(request)
    kv.free(other)
    assert len(kv.pool.dirty) == 6
    check(kv, [])


@pytest.mark.parametrize("groups", [[CacheGroup("full", 4)], [CacheGroup("full", 4), CacheGroup("full", 4, 2)]])
def test_blocks_taken_at_once_are_those_taken_one_by_one(groups):
    """The blank ones first, then those that were used longest ago; of larger blocks the rest is blank, too."""
    pools = [PagePool(groups, num_pages=16) for _ in range(2)]
    for pool in pools:
        for number, group in enumerate([*range(len(groups)), 0, 0, 0, 0, 0]):
            block = pool.take(group)
            pool.publish(group, bytes([number]), block)
            pool.release([block], is_spent=number == 3)
    taken = [pools[0].take_blocks(0, 13), [pools[1].take(0) for _ in range(13)]]
    assert taken[0] == taken[1]
    assert pools[0].num_evictions == pools[1].num_evictions
    assert pools[0].num_evictions[0] > 0
    for pool in pools:
        pool.check(dict.fromkeys(taken[0], 1))


def test_a_block_computed_anew_takes_the_place_of_one_that_nobody_holds():
    pool = PagePool([CacheGroup("full", 4), CacheGroup("state", 4, 3)], num_pages=16)
    pool.news = []
    for group, size in ((0, 1), (1, 3)):
        held, again, third = (pool.take(group) for _ in range(3))
        pool.publish(group, b"key", held)
        pool.publish(group, b"key", again)
        assert pool.find(group, b"key") == held  # which others may read
        pool.release([held], is_spent=True)
        num_blank = len(pool._blank)
        pool.publish(group, b"key", again)
        assert (pool.find(group, b"key"), pool.num_cached[group], pool.num_worthless) == (again, 0, num_blank + size)
        pool.release([again])
        pool.pin(again)
        pool.publish(group, b"key", third)
        assert pool.find(group, b"key") == again
        assert pool.news == [held, held, again, again]
        pool.release([third])
        pool.check({})
        pool.news = []
