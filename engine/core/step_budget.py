"""mixed_step_tokens(): limits the tokens of a step with decode rows and prompt chunks. Plain Python; never torch.

The decode rows wait for the whole step. Beside decode rows prompt tokens cost less than alone, as long as the step is
short (docs/explanation/scheduling.md). So prompts are spread over many steps, but fast enough to replace the requests
that end meanwhile, and to fill the batch soon after a burst.
"""

import math

from engine.interface.config import SchedulerConfig

# A load with 4 prompt tokens per output token needs 5
_TOKENS_PER_DECODE = 8
_STEPS_PER_BURST = 32  # the prompts of all requests that could start now are computed within this many steps


def mixed_step_tokens(config: SchedulerConfig, *, num_decodes: int, num_pending: int, context: int = 0) -> int:
    """Return the token limit of a step with num_decodes decode rows and prompt chunks, decode rows included.

    num_pending: prompt tokens of the requests that could start now, and of those whose prompt is partly computed.
    context: the longest context of the latter. The limit is one of time, and a token takes longer after more context.
    """
    most = config.max_decode_step_tokens or config.max_num_batched_tokens
    least = config.min_decode_step_tokens or most
    if config.costly_context and config.max_mixed_cost:
        fitting = config.max_mixed_cost / (1 + context / config.costly_context)
        sizes = [size for size in config.step_sizes if size <= most] or [most]
        most = max(least, min(sizes, key=lambda size: abs(math.log(size / fitting))))
    wanted = max(least, _TOKENS_PER_DECODE * num_decodes, num_decodes + num_pending // _STEPS_PER_BURST)
    return min(next((size for size in config.step_sizes if size >= wanted), wanted), most)
