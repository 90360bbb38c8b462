"""prompt_budget() limits the prompt tokens of a step; Lead decides whose they are. Plain Python; never torch.

The decode rows wait for the whole step. Beside decode rows prompt tokens cost less than alone, as long as the step is
short (docs/explanation/scheduling.md). So prompts are spread over many steps, but fast enough to replace the requests
that end meanwhile, and to fill the batch soon after a burst.
"""

import math
from collections.abc import Callable, Iterator, Sequence

from engine.core.planned_step import PlannedStep
from engine.core.request import Request
from engine.core.steady_rows import RunningRequests
from engine.core.waiting_queue import WaitingQueue
from engine.interface.config import SchedulerConfig

# A load with 4 prompt tokens per output token needs 5
_TOKENS_PER_DECODE = 8
MOST_AHEAD = 4
STEPS_PER_PAUSE = 32
_STEPS_PER_BURST = 32  # the prompts of all requests that could start now are computed within this many steps


def prompt_budget(
    config: SchedulerConfig,
    budget: int,
    num_decodes: int,
    begun: Sequence[Request],
    waiting: WaitingQueue,
    num_free_rows: int,
    newcomer: Request | None = None,
) -> int:
    """Return the prompt tokens of a step with num_decodes decode rows, of the `budget` that these left.

    begun: the requests whose prompt is partly computed. Decode rows wait for the prompts; without either all is left.
    newcomer: the first one in this step, see mixed_step_tokens().
    """
    if not num_decodes or not (begun or waiting):
        return budget
    pending = waiting.num_tokens_of_first(num_free_rows)
    pending += sum(request.num_prefill_tokens for request in begun)  # whole, so that chunks do not shrink
    context = max((request.num_computed_tokens for request in begun), default=0)
    num_whole = 0 if newcomer is None else newcomer.num_tokens - newcomer.num_computed_tokens
    most = mixed_step_tokens(config, num_decodes=num_decodes, num_pending=pending, context=context, num_whole=num_whole)
    return max(min(budget, most - num_decodes), 0)


def mixed_step_tokens(
    config: SchedulerConfig, *, num_decodes: int, num_pending: int, context: int = 0, num_whole: int = 0
) -> int:
    """Return the token limit of a step with num_decodes decode rows and prompt chunks, decode rows included.

    num_pending: prompt tokens of the requests that could start now, and of those whose prompt is partly computed.
    context: the longest context of the latter. The limit is one of time, and a token takes longer after more context.
    num_whole: tokens of a prompt that is not cut, if a step of at most twice the tokens has room for it.
    """
    most = config.max_decode_step_tokens or config.max_num_batched_tokens
    least = config.min_decode_step_tokens or most
    if config.costly_context and config.max_mixed_cost:
        fitting = config.max_mixed_cost / (1 + context / config.costly_context)
        sizes = [size for size in config.step_sizes if size <= most] or [most]
        most = max(least, min(sizes, key=lambda size: abs(math.log(size / fitting))))
    wanted = max(least, _TOKENS_PER_DECODE * num_decodes, num_decodes + num_pending // _STEPS_PER_BURST)
    if num_whole and num_decodes + num_whole <= 2 * wanted:
        wanted = max(wanted, num_decodes + num_whole)
    return min(next((size for size in config.step_sizes if size >= wanted), wanted), most)


class Lead:
    """Decides which steps compute the prompts of newcomers alone, so that nothing else delays their first tokens.

    A newcomer is a request that started while its tenant had few rows (engine/core/tenants.py), until its prompt is
    computed. A step that goes ahead computes newcomers' prompts and no others. Every other step computes prompts in the
    order of service, in which newcomers have no advantage.

    Bound: steps that go ahead while others' prompts wait are counted, every other step with prompts takes one off, and
    at MOST_AHEAD none goes ahead. So at most MOST_AHEAD do in a row, and of any n steps with prompts at most
    (n + MOST_AHEAD) / 2: whatever the number, size and weight of newcomers, others keep half of them.

    While prompts of tenants with rows wait, a step that goes ahead for a tenant without a row, or for a prompt that is
    partly computed, leaves out the answers as well, at most one step of any STEPS_PER_PAUSE: with them it takes longer,
    and is padded to a larger size.
    """

    def __init__(self) -> None:
        self.newcomers: set[Request] = set()  # the scheduler adds them; membership only, it orders nothing
        self._num_ahead = 0
        self._num_with_answers = STEPS_PER_PAUSE  # steps since one left out the answers

    def first(
        self, begun: list[Request], waiting: WaitingQueue, next_newcomer: Callable[[], Request | None]
    ) -> Request | None:
        """Return the first newcomer of a step that may go ahead: one whose prompt is begun, or that starts next."""
        if not waiting.has_several_tenants or self._num_ahead >= MOST_AHEAD:
            return None
        first = next((request for request in begun if request in self.newcomers), None)
        return next_newcomer() if first is None and waiting else first

    def leaves_out_answers(self, running: RunningRequests, waiting: WaitingQueue) -> bool:
        """Return whether the next step has no answers if it computes newcomers' prompts. parts() must follow."""
        if not waiting.has_several_tenants:
            return False
        if self._num_with_answers < STEPS_PER_PAUSE - 1 or self._num_ahead >= MOST_AHEAD:
            return False
        begun = running.begun
        if len(begun) == len(running.requests):
            return False
        tenant_ids = {request.tenant_id for request in running.requests}
        num_of_others = sum(queue.tenant_id in tenant_ids for queue in waiting.tenants)
        if not num_of_others and self.newcomers.issuperset(begun):
            return False
        return not self.newcomers.isdisjoint(begun) or num_of_others < len(waiting.tenants)

    def parts(
        self, begun: list[Request], step: PlannedStep, waiting: WaitingQueue, *, is_stuck: bool, is_alone: bool
    ) -> Iterator[tuple[list[Request], bool]]:
        """Yield the prompts to go on with, and whether newcomers alone may start behind them; plan each in between.

        begun: the requests whose prompt is partly computed. is_stuck: no row had room, so this step goes in order.
        is_alone: the step has no answers, and so no prompts but newcomers'.
        """
        self.newcomers.intersection_update(begun)
        num_before = len(step.singles)
        self._num_with_answers += step.num_rows > 0  # a plan without rows is made again, or is no step
        if waiting.has_several_tenants and not is_stuck and self._num_ahead < MOST_AHEAD:
            yield [request for request in begun if request in self.newcomers], True
            begun = [request for request in begun if request not in self.newcomers]
            if is_alone and step.singles:
                self._num_with_answers = 0
            if len(step.singles) > num_before and (begun or waiting):
                self._num_ahead += 1
                return
            if is_alone:
                return
        yield begun, False
        if len(step.singles) > num_before or not (begun or waiting):  # a step without room for prompts gave them none
            self._num_ahead = max(self._num_ahead - 1, 0)
