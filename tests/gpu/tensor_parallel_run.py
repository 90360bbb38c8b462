"""Prints the tokens that a checkpoint gives when it is split over GPUs; run by test_tensor_parallel_cuda.

Usage: python -m tests.gpu.tensor_parallel_run CHECKPOINT SIZE EAGER DEPTH [DTYPE [NCCL [EXPERTS]]]
NCCL: True if it is to make all sums. EXPERTS: True for --expert-parallel.
"""

import faulthandler
import json
import sys

import torch

from engine.interface.config import EngineConfig
from engine.offline import OfflineEngine
from engine.tensor_parallel import process_group
from tests.unit.engine.test_real_model import mixed_params, prompts, tokens

_PATIENCE_S = 150
LENGTHS = (5, 17, 30, 61, 12, 40, 23, 35)


def main(
    checkpoint: str,
    size: int,
    is_eager: bool,
    depth: int,
    dtype: str = "float32",
    has_nccl_only: bool = False,
    is_expert_parallel: bool = False,
) -> None:
    faulthandler.dump_traceback_later(_PATIENCE_S, exit=True)  # a rank that waits says where
    torch.backends.cuda.matmul.allow_tf32 = False
    process_group.IS_ENABLED = not has_nccl_only  # one rank's word is enough
    offline = OfflineEngine.load(
        EngineConfig(
            model=checkpoint,
            tensor_parallel_size=size,
            is_expert_parallel=is_expert_parallel,
            dtype=dtype,
            block_size=16,
            overlap_depth=depth,
            enforce_eager=is_eager,
            max_num_batched_tokens=48,
            max_num_seqs=8,
            kv_cache_memory_bytes=64 * 1024**2,
        )
    )
    offline.self_test()
    rounds = [tokens(offline.generate(prompts(*LENGTHS), mixed_params(len(LENGTHS)))) for _ in range(2)]
    print(offline.loaded.facts.get("Sums"))
    print(json.dumps(rounds))


if __name__ == "__main__":
    path, num_gpus, eager, steps, *more = sys.argv[1:]
    nccl_and_experts = [argument == "True" for argument in more[1:]]
    main(path, int(num_gpus), eager == "True", int(steps), *more[:1], *nccl_and_experts)
