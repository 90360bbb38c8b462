"""Checkpoints: live states of requests, and saved ones that others go on from. Plain Python; never torch.

A request's live state is one block, taken at its admission and advanced by each of its rows. It is always that of all
tokens before the row, so a state can be saved only where a row starts: the row's step first copies the live pages to
pages of their own, which are published at the step's commit. A hit is the same copy the other way. Sources and targets
are held until the commit.
Saved are the states at a request's marks: the last place of its prompt, and parting points, where the full groups know
a longer prefix than the states do, and others have gone on. A saved state of which the same conversation has a later
one, and which no other hit, is reused first; the others with the blocks of the request that saved them, since neither
is of use without the other. Saving preempts nobody: without free pages it is skipped.
An answer is saved too, at every answer_step tokens. The row before such a place has no drafts, since the live state is
complete only then. What it is worth is seen from the turn before: if the request's hit was a state of an answer, its
own answer's take any free page, and supersede that of its prompt. Else they supersede each other alone, since turns may
go on from the prompt and drop the answer's reasoning, and take only pages that are blank or hardly worth keeping: so
they drive nothing out (docs/decisions/054-a-turn-shows-which-states-the-next-one-needs.md).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.core.cache_layout import CacheLayout, GroupLayout
from engine.core.host_copies import HostCopies
from engine.core.page_pool import PagePool
from engine.core.prefix_hits import Hit
from engine.core.request import BlockTable, Request

_ANSWER_TOKENS = 64  # from one saved state of an answer to the next, about


class Save(NamedTuple):
    """A state that a planned step saves, to be published at its commit."""

    request: Request
    num_tokens: int  # before it
    group: GroupLayout
    block: int


@dataclass(slots=True)
class StepKv:
    """What a step does to pages, and the blocks that it holds until its commit."""

    zeroed: list[int]
    copies_in: list[tuple[int, int]] = field(default_factory=list)
    copies_out: list[tuple[int, int]] = field(default_factory=list)
    restored: list[int] = field(default_factory=list)  # sources of copies_in
    saves: list[Save] = field(default_factory=list)
    host: HostCopies | None = None  # which hold blocks of their own

    @property
    def blocks(self) -> Iterator[int]:
        """All that it holds for states."""
        yield from self.restored
        for save in self.saves:
            yield save.block


class Checkpoints:
    """Takes, restores and saves states. Does nothing for a model without state groups."""

    def __init__(self, layout: CacheLayout, pool: PagePool) -> None:
        self.num_saved = 0
        self.num_saved_in_answers = 0  # of num_saved
        self.num_skipped = 0  # for want of pages
        self.num_restored = 0
        self.answer_step = layout.step * -(-_ANSWER_TOKENS // layout.step)  # tokens
        self._layout = layout
        self._pool = pool
        self._num_hits: dict[int, int] = {}  # of saved states, by block; a parting point begins with one
        self._of_answers: set[int] = set()  # the blocks of these that are of answers

    def begin(self, request: Request, hit: Hit) -> None:
        """Take the live states of a request; the hit's saved states, which are held, are copied by its first row."""
        for group in self._layout.states:
            request.tables[group.index] = BlockTable([self._pool.take(group.index)])
            request.restored_tokens = hit.num_tokens
            for block in hit.blocks[group.index]:
                request.restores.append((group.index, block))
                if hit.num_tokens < request.num_prompt_tokens:
                    request.follows_answer = block in self._of_answers
                if request.checkpoint != hit.num_tokens:
                    self._num_hits[block] += 1
        if hit.num_tokens and request.checkpoint != hit.num_tokens:
            request.checkpoint, request.has_hit_checkpoint = hit.num_tokens, True

    def end_of_chunk(self, request: Request, end: int) -> int:
        """Return where a prompt chunk ends that may end at `end`: at a mark, else where states may be saved later."""
        start, step = request.num_computed_tokens, self._layout.step
        mark = next((mark for mark in request.marks if mark > start), end)
        if mark < end and not self._is_saved(request, mark):
            return mark
        if end == request.num_prefill_tokens or end // step * step <= start:
            return end
        return end // step * step

    def begin_row(self, request: Request, step: StepKv, *, num_reserved: int) -> list[tuple[int, int, list[int]]]:
        """Copy the states of a hit, or save those before the row, in its step. Returns RowPlan.new_blocks of states."""
        self._restore(request, step)
        if request.num_computed_tokens in request.marks and not request.is_decoding:
            self._save(request, step, num_reserved=num_reserved)
        added: list[tuple[int, int, list[int]]] = []
        for group in self._layout.states:
            table = request.tables[group.index]
            if not table.num_sent:
                added.append((group.first_table, 0, self._pool.pages(table.blocks[0])))
                table.num_sent = 1
        return added

    def next_save(self, num_tokens: int) -> int:
        """Return the first place behind these tokens of an answer where its state is due."""
        return (num_tokens // self.answer_step + 1) * self.answer_step

    def save_in_answer(self, request: Request, step: StepKv, *, num_reserved: int) -> None:
        """Save the state before a decode row that is planned for sure, if its place and the pages are right."""
        start = request.num_computed_tokens
        assert start <= request.num_prompt_tokens + len(request.output_token_ids)  # no hash of a pending token
        is_due = start == request.next_save_tokens and not request.is_drafted  # else the state lacks its last tokens
        request.next_save_tokens = self.next_save(start)
        num_pages = sum(group.pages for group in self._layout.states)
        num_free = self._pool.num_free if request.follows_answer else self._pool.num_worthless
        has_pages = num_pages <= num_free - num_reserved * self._layout.reserve
        if not is_due or not has_pages or self._is_saved(request, start):
            return
        num_prompt = request.num_prompt_tokens
        request.marks = [*(mark for mark in request.marks if mark < num_prompt), start]
        self._copy_out(request, step)

    def end_step(self, step: StepKv, published: Iterable[Save]) -> None:
        """Publish states that a step has saved, and release all that it held. Those of failed requests are zeroed."""
        self._pool.taint(save.block for save in step.saves if save.request.finish_reason == "error")
        for save in published:
            request, index = save.request, save.group.index
            key = self._key(request, save.num_tokens)
            if self._pool.find(index, key) is None:
                self._pool.publish(index, key, save.block)
                self._num_hits[save.block] = int(save.num_tokens == request.parting_point)
                self._of_answers.discard(save.block)
                if save.num_tokens >= request.num_prompt_tokens:
                    self._of_answers.add(save.block)
                self.num_saved += 1
                self.num_saved_in_answers += save.num_tokens >= request.num_prompt_tokens
                if save.group is self._layout.states[0]:
                    request.saved_tokens.append(save.num_tokens)
            is_in_answer = [place >= request.num_prompt_tokens for place in (request.checkpoint, save.num_tokens)]
            is_later = request.checkpoint not in (0, save.num_tokens)
            if is_later and (request.follows_answer or is_in_answer != [False, True]):
                self._supersede(request, save.group)
        for save in published:
            save.request.checkpoint, save.request.has_hit_checkpoint = save.num_tokens, False
        self._pool.release(step.blocks)

    def touch(self, request: Request) -> None:
        """Let the states of a request whose blocks are released now be reused right before them."""
        for group in self._layout.states:
            for num_tokens in sorted({request.checkpoint, *request.marks}):
                if 0 < num_tokens <= len(request.block_hashes) * self._layout.unit:
                    block = self._pool.find(group.index, self._key(request, num_tokens))
                    if block is not None:
                        self._pool.order.touch(block)

    def adopt(self, block: int) -> None:
        """Take note of a saved state that came from the host."""
        self._num_hits[block] = 0
        self._of_answers.discard(block)

    def saved_tokens(self, request: Request) -> list[int]:
        """Return where a request saved states that can still be found."""
        return [num_tokens for num_tokens in request.saved_tokens if self._is_saved(request, num_tokens)]

    def counts(self) -> dict[str, int]:
        """Return how many states were saved, not saved for want of pages, and restored."""
        return {"saved": self.num_saved, "skipped": self.num_skipped, "restored": self.num_restored}

    def num_findable(self) -> tuple[int, int]:
        """Return the number of saved states that can be found, and of their pages."""
        counts = [(self._pool.num_published(group.index), group.pages) for group in self._layout.states]
        return sum(count for count, _ in counts), sum(count * pages for count, pages in counts)

    def taint(self, request: Request) -> None:
        """Take what a request has saved or found out of the prefix cache."""
        for group in self._layout.states:
            for num_tokens in {request.checkpoint, *request.marks, *request.saved_tokens}:
                if 0 < num_tokens <= len(request.block_hashes) * self._layout.unit:
                    self._pool.expel(group.index, self._key(request, num_tokens))

    def _restore(self, request: Request, step: StepKv) -> None:
        for index, block in request.restores:
            (live,) = request.tables[index].blocks
            step.copies_in += zip(self._pool.pages(block), self._pool.pages(live), strict=True)
            step.restored.append(block)
            self.num_restored += 1
        request.restores = []

    def _save(self, request: Request, step: StepKv, *, num_reserved: int) -> None:
        start, pool = request.num_computed_tokens, self._pool
        if self._is_saved(request, start):
            return
        if sum(group.pages for group in self._layout.states) > pool.num_free - num_reserved * self._layout.reserve:
            self.num_skipped += 1
            return
        self._copy_out(request, step)

    def _copy_out(self, request: Request, step: StepKv) -> None:
        assert not request.is_drafted, "the live state lacks the tokens of its newest row"
        pool = self._pool
        for group in self._layout.states:
            (live,) = request.tables[group.index].blocks
            block = pool.take(group.index)
            step.copies_out += zip(pool.pages(live), pool.pages(block), strict=True)
            step.saves.append(Save(request, request.num_computed_tokens, group, block))

    def _supersede(self, request: Request, group: GroupLayout) -> None:
        block = self._pool.find(group.index, self._key(request, request.checkpoint))
        if block is not None and self._num_hits[block] <= int(request.has_hit_checkpoint):
            self._pool.spend(block)

    def _is_saved(self, request: Request, num_tokens: int) -> bool:
        request.extend_hashes(num_tokens, unit=self._layout.unit)
        key = self._key(request, num_tokens)
        return all(self._pool.find(group.index, key) is not None for group in self._layout.states)

    def _key(self, request: Request, num_tokens: int) -> bytes:
        return request.block_hashes[num_tokens // self._layout.unit - 1]
