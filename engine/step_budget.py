"""How many tokens a step may have while requests decode, which wait for the whole of it. Plain Python.

Prompt tokens ride along with decode rows for less than they cost alone, as long as the step stays short (docs/
performance.md): so they are spread over many steps, but not over more than keep up with the requests that end
meanwhile, nor so many that a burst fills the batch late, or a long prompt takes long. What bounds a step is its time: a
token of a prompt costs the more the longer the context before it.
"""

import math

from engine.config import SchedulerConfig

# Whoever sends 4 prompt tokens per token of output needs 5
_TOKENS_PER_DECODE = 8
_STEPS_PER_BURST = 32  # in which the prompts that could start now are computed


def mixed_step_tokens(config: SchedulerConfig, *, num_decodes: int, num_pending: int, context: int = 0) -> int:
    """Return the tokens of a step with prompt chunks beside num_decodes decode rows, these included.

    num_pending: prompt tokens of the requests that could start now, and of those that have. context: of the longest
    prompt under way.
    """
    most = config.max_num_mixed_tokens or config.max_num_batched_tokens
    least = config.min_num_mixed_tokens or most
    if config.costly_context and config.max_mixed_cost:
        fitting = config.max_mixed_cost / (1 + context / config.costly_context)
        sizes = [size for size in config.step_sizes if size <= most] or [most]
        most = max(least, min(sizes, key=lambda size: abs(math.log(size / fitting))))
    wanted = max(least, _TOKENS_PER_DECODE * num_decodes, num_decodes + num_pending // _STEPS_PER_BURST)
    return min(next((size for size in config.step_sizes if size >= wanted), wanted), most)
