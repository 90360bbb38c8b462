"""checked_grammar: wait for the test compilation of a request's grammar, within its deadline. Imports server only."""

import asyncio
import time

from starlette.requests import Request

from engine.interface.errors import RequestAborted
from engine.interface.protocol import GrammarSpec
from server.api.request_record import record_of
from server.api.sse import wait_or_gone
from server.errors import DeadlineExceeded
from server.structured_output.compile_check import GrammarChecker
from server.structured_output.grammar_spec import ConstraintRequest


async def checked_grammar(
    grammars: GrammarChecker, constraint: ConstraintRequest | None, request: Request, *, timeout_s: float | None
) -> GrammarSpec | None:
    """Return the constraint's grammar after it has compiled; None without one. `timeout_s`: from arrival.

    Raises the errors of GrammarChecker.check(), DeadlineExceeded, RequestAborted (by DELETE) and ClientGone.
    """
    if constraint is None:
        return None
    record = record_of(request.scope)
    check = asyncio.create_task(
        grammars.check(constraint.spec, param=constraint.param, client=record.key_hash, tenant=record.tenant)
    )
    record.cancel = check.cancel
    if record.is_cancelled:
        check.cancel()
    try:
        async with asyncio.timeout(None if timeout_s is None else record.arrival_s + timeout_s - time.monotonic()):
            await wait_or_gone(request.receive, check)
    except TimeoutError:
        assert timeout_s is not None
        raise DeadlineExceeded(timeout_s) from None
    finally:
        record.cancel = None
    if check.cancelled():
        raise RequestAborted("The request was cancelled.")
    return check.result()
