"""SharedPrefixes: the running requests that begin with the same blocks, which attention reads once. Never torch.

A tree of the running requests' prompts, by the blocks that hold them: a node is a prefix of whole chunks of blocks that
several of them have had in common. A request takes part from its admission until it stops running, and its prompt's
blocks stay where they are meanwhile, so nothing is done between two steps with the same requests. Of the nodes on a
request's path at most one is its group: those are chosen that together spare the most, as SharingRates estimates it.
A change of the running requests changes counts on one path, and so is looked at there alone.

Groups have numbers, from 1 on, of which there are few. The device keeps the number and the tokens of each running
request (RequestShare), and finds the rows of a group itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.core.cache_layout import CacheLayout
from engine.core.request import Request
from engine.core.step import RequestShare
from engine.interface.config import SchedulerConfig, SharingRates

MAX_GROUPS = 32  # a step's first kernel takes them one after the other
_STAYS = 5 / 4  # a group stays until others spare so many times what it spares: changing it costs an update per request


@dataclass(slots=True, eq=False)
class _Node:
    """A prefix of `depth` chunks of blocks."""

    parent: _Node | None
    key: tuple[int, ...]  # the blocks of its last chunk
    depth: int
    num_requests: int = 0
    below: int = 0  # the most that groups of longer prefixes spare
    best: int = 0  # the most that it or these spare
    number: int = 0  # of its group; 0: it is none
    # By the next chunk's blocks: a longer prefix, or the only request that goes on so
    children: dict[tuple[int, ...], _Node | Request] = field(default_factory=dict)
    ended: dict[Request, None] = field(default_factory=dict)  # those without another whole chunk

    def requests(self) -> Iterator[Request]:
        """Return all that begin with it."""
        for node in self.nodes():
            yield from node.ended
            yield from (child for child in node.children.values() if isinstance(child, Request))

    def nodes(self) -> Iterator[_Node]:
        """Return it and all longer ones."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack += [child for child in node.children.values() if isinstance(child, _Node)]


class SharedPrefixes:
    """Owns the tree of the running requests' prompts, and the groups."""

    def __init__(self, rates: SharingRates, *, group_index: int, block_tokens: int) -> None:
        """group_index: of the layers that see all tokens; block_tokens: of their blocks."""
        self._rates = rates
        self._group_index = group_index
        self._blocks = max(1, rates.chunk_tokens // block_tokens)  # of a chunk
        self._tokens = self._blocks * block_tokens
        self._root = _Node(None, (), 0)
        self._places: dict[Request, tuple[_Node, tuple[int, ...] | None]] = {}  # node, and key in its children
        self._groups: dict[int, _Node] = {}
        self._free_numbers = list(range(1, MAX_GROUPS + 1))[::-1]
        self._updates: dict[Request, _Node | None] = {}  # since the last plan
        self._spared_us = 0
        self._is_changed = False

    @classmethod
    def of(cls, config: SchedulerConfig) -> SharedPrefixes | None:
        """Return None if rows are not to be grouped: without a prefix cache no blocks are shared."""
        layout = CacheLayout(config)
        if config.sharing is None or not config.enable_prefix_caching or len(layout.full) != 1:
            return None  # of several groups with all tokens, equal blocks of one say nothing of the others
        (group,) = layout.full
        return cls(config.sharing, group_index=group.index, block_tokens=group.tokens)

    def join(self, request: Request) -> None:
        """Take in a request that was admitted. O(1) per chunk that it shares."""
        if request.embedding is not None:
            return  # it never decodes
        node = self._root
        while (key := self._key(request, node.depth)) is not None:
            child = node.children.get(key)
            if child is None:
                node.children[key] = request
                break
            if isinstance(child, Request):
                child = self._split(node, key, child)
            node = child
        else:
            node.ended[request] = None
        self._places[request] = node, key
        self._count(node, 1)
        self._choose_on_path(node, request)

    def leave(self, request: Request) -> None:
        """Let a request go that was running."""
        if request not in self._places:
            return
        node, key = self._places.pop(request)
        self._updates.pop(request, None)
        if key is None:
            del node.ended[request]
        else:
            del node.children[key]
        self._count(node, -1)
        self._choose_on_path(node, None)
        while node.parent is not None and not node.num_requests:
            del node.parent.children[node.key]
            node = node.parent

    def take(self) -> tuple[list[RequestShare], int]:
        """Return what the device does not know of groups, and the µs that they spare in a step, 0: it costs more."""
        if self._is_changed:
            spared = sum(self._spared(node) for node in self._groups.values()) - self._rates.step_keys
            self._spared_us = max(1, round(spared * self._rates.key_us)) if self._groups and spared > 0 else 0
            self._is_changed = False
        if not self._updates:
            return [], self._spared_us
        updates, self._updates = self._updates, {}
        shares = [
            (request.req_index, 0, 0) if node is None else (request.req_index, node.number, node.depth * self._tokens)
            for request, node in updates.items()
        ]
        return shares, self._spared_us

    def send_again(self) -> None:
        """Have the next plan name every request's group, since plans were dropped."""
        self._updates = dict.fromkeys(self._places)
        for node in self._groups.values():
            self._updates.update(dict.fromkeys(node.requests(), node))

    def check(self, running: list[Request]) -> None:
        """Assert that the tree is that of the running requests; tests call it after every step."""
        assert set(self._places) == {request for request in running if request.embedding is None}
        assert self._groups == {node.number: node for node in self._root.nodes() if node.number}
        assert sorted([*self._groups, *self._free_numbers]) == list(range(1, MAX_GROUPS + 1))
        for node in self._root.nodes():
            requests = list(node.requests())
            assert node.num_requests == len(requests)
            assert node.below == sum(child.best for child in node.children.values() if isinstance(child, _Node))
            for request in requests:
                assert [self._key(request, depth) for depth in range(node.depth)] == _keys(node)
            if node.number:
                assert len(requests) > 1
                assert not any(other.number for other in node.nodes() if other is not node)

    def _key(self, request: Request, depth: int) -> tuple[int, ...] | None:
        """Return the blocks of a chunk of its prompt; None: it has no such whole chunk."""
        if (depth + 1) * self._tokens > request.num_prompt_tokens:
            return None
        return tuple(request.tables[self._group_index].blocks[depth * self._blocks : (depth + 1) * self._blocks])

    def _split(self, node: _Node, key: tuple[int, ...], request: Request) -> _Node:
        """Make a node of the only request that had these blocks."""
        child = node.children[key] = _Node(node, key, node.depth + 1, num_requests=1)
        own = self._key(request, child.depth)
        if own is None:
            child.ended[request] = None
        else:
            child.children[own] = request
        self._places[request] = child, own
        return child

    def _count(self, node: _Node, change: int) -> None:
        """Add to the requests of a node and those before it, and see what they spare."""
        self._is_changed = True
        while node.parent is not None:
            node.num_requests += change
            best = max(self._spared(node), node.below)
            node.parent.below += best - node.best
            node.best = best
            node = node.parent
        node.num_requests += change

    def _spared(self, node: _Node) -> int:
        """Return what a group of the node's requests spares in each step, in keys of a row."""
        rates, count, tokens = self._rates, node.num_requests, node.depth * self._tokens
        of_row = rates.row_keys + tokens * rates.shared_percent // 100
        return (count - 1) * tokens - count * of_row - rates.group_keys

    def _is_chosen(self, node: _Node) -> bool:
        spared = self._spared(node)
        if node.number:
            return spared > 0 and spared * _STAYS >= node.below
        return spared > 0 and spared >= node.below and bool(self._free_numbers)

    def _choose_on_path(self, last: _Node, request: Request | None) -> None:
        """Choose groups anew after a change of counts up to `last`. request: new, to be told its group."""
        path, node = [], last
        while node.parent is not None:
            path.append(node)
            node = node.parent
        for node in reversed(path):
            if self._is_chosen(node):
                if not node.number:
                    self._begin_group(node)
                elif request is not None:
                    self._updates[request] = node
                return
            if node.number:
                self._end_group(node)
                self._updates.update(dict.fromkeys(node.requests()))
                self._choose_below(node)
                return

    def _choose_below(self, node: _Node) -> None:
        """Choose groups of prefixes longer than a node's, none of which is a group."""
        stack = [node]
        while stack:
            for child in stack.pop().children.values():
                if isinstance(child, _Node) and child.best > 0:
                    if self._is_chosen(child):
                        self._begin_group(child)
                    else:
                        stack.append(child)

    def _begin_group(self, node: _Node) -> None:
        for other in node.nodes():
            if other.number:
                self._end_group(other)
        node.number = self._free_numbers.pop()
        self._groups[node.number] = node
        self._updates.update(dict.fromkeys(node.requests(), node))

    def _end_group(self, node: _Node) -> None:
        del self._groups[node.number]
        self._free_numbers.append(node.number)
        node.number = 0


def _keys(node: _Node) -> list[tuple[int, ...]]:
    """Return the chunks of a prefix."""
    keys = []
    while node.parent is not None:
        keys.append(node.key)
        node = node.parent
    return keys[::-1]
