"""How many tokens a step may have while requests decode, which wait for the whole of it. Plain Python.

Prompt tokens ride along with decode rows for less than they cost alone, as long as the step stays short (docs/
performance.md): so they are spread over many steps, but not over more than keep up with the requests that end
meanwhile, nor so many that a burst fills the batch late.
"""

from engine.interface.config import SchedulerConfig

# Whoever sends 4 prompt tokens per token of output needs 5
_TOKENS_PER_DECODE = 8
_STEPS_PER_BURST = 32  # in which the prompts that could start now are computed


def mixed_step_tokens(config: SchedulerConfig, *, num_decodes: int, num_pending: int) -> int:
    """Return the tokens of a step with prompt chunks beside num_decodes decode rows, these included.

    num_pending: prompt tokens of the requests that could start now.
    """
    most = config.max_num_mixed_tokens or config.max_num_batched_tokens
    least = config.min_num_mixed_tokens or most
    wanted = max(least, _TOKENS_PER_DECODE * num_decodes, num_decodes + num_pending // _STEPS_PER_BURST)
    return min(next((size for size in config.step_sizes if size >= wanted), wanted), most)
