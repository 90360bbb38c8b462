"""A scheduler planned and committed by hand, so that any number of steps may be in flight; check() runs after each."""

import msgspec

from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.step import StepResult
from engine.interface.config import SchedulerConfig
from engine.interface.protocol import SamplingParams

STOP = 49


def make_scheduler(**changes):
    config = SchedulerConfig(num_pages=33, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64)
    return Scheduler(msgspec.structs.replace(config, **changes))


def add(scheduler, request_id, prompt, max_tokens=20, *, arrival_s=0.0, priority=0, **params):
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=[STOP], **params)
    request = Request(request_id, list(prompt), sampling, arrival_s=arrival_s, priority=priority)
    scheduler.add(request)
    return request


def schedule(scheduler):
    plan = scheduler.schedule(0.0)
    scheduler.check()
    return plan


def commit(scheduler, plan, token_id=5):
    outputs = scheduler.commit(StepResult(plan.step_id, [token_id] * plan.num_samples), 0.0)
    scheduler.check()
    return outputs.rows()


def step(scheduler, token_id=5):
    plan = schedule(scheduler)
    commit(scheduler, plan, token_id)
    return plan


def pump(scheduler, num_steps):
    """Run at depth 2 until step `num_steps` is in flight; return it."""
    plan = schedule(scheduler)
    while plan.step_id < num_steps:
        following = schedule(scheduler)
        commit(scheduler, plan)
        plan = following
    return plan


def make_shortage():
    """A decoding keeper and a victim, whose last chunk is in flight, fill the pool; the keeper needs a block now."""
    scheduler = make_scheduler(num_pages=13, max_num_batched_tokens=8)
    add(scheduler, "keeper", range(7), arrival_s=1.0)
    add(scheduler, "victim", range(36), arrival_s=2.0)
    in_flight = pump(scheduler, 5)
    assert scheduler.kv.pool.num_free == 0
    return scheduler, in_flight
