"""Prints the tokens that a checkpoint gives when it is split over GPUs; run by test_tensor_parallel_cuda.

Usage: python -m tests.gpu.tensor_parallel_run CHECKPOINT SIZE EAGER DEPTH
"""

import json
import sys

import torch

from engine.config import EngineConfig
from engine.offline import OfflineEngine
from tests.unit.engine.test_real_model import mixed_params, prompts, tokens

LENGTHS = (5, 17, 30, 61, 12, 40, 23, 35)


def main(checkpoint: str, size: int, is_eager: bool, depth: int) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    offline = OfflineEngine.load(
        EngineConfig(
            model=checkpoint,
            tensor_parallel_size=size,
            dtype="float32",
            block_size=16,
            depth=depth,
            enforce_eager=is_eager,
            max_num_batched_tokens=48,
            max_num_seqs=8,
            kv_cache_memory_bytes=64 * 1024**2,
        )
    )
    offline.self_test()
    rounds = [tokens(offline.generate(prompts(*LENGTHS), mixed_params(len(LENGTHS)))) for _ in range(2)]
    print(json.dumps(rounds))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True", int(sys.argv[4]))
