"""One rank of test_tensor_parallel_cuda: OneShot's sums are everybody's, call after call, in a graph and without.

Usage: python -m tests.gpu.one_shot_rank RANK SIZE STORE_FILE
"""

import sys

import torch
from torch import distributed

from engine.process_group import join_ranks

SHAPES = ((1, 1024), (8, 4096), (33, 1000), (64, 4096), (256, 1024), (300, 4096))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def main(rank: int, size: int, store_file: str) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    tp = join_ranks(rank=rank, size=size, rendezvous=store_file, device=device)
    print("one_shot", tp.one_shot is not None, flush=True)
    generator = torch.Generator(device).manual_seed(rank)
    for dtype in DTYPES:
        for shape in SHAPES:
            x = torch.randn(shape, generator=generator, device=device).to(dtype)
            parts = tp.all_gather(x[None], 0)
            expected = parts.float().sum(0).to(dtype)
            graph, calls = torch.cuda.CUDAGraph(), []
            tp.all_reduce(x.clone())
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                calls += [tp.all_reduce(x * 1.0) for _ in range(3)]
            for _ in range(3):
                graph.replay()
            for total in (*calls, tp.all_reduce(x.clone())):
                torch.testing.assert_close(total, expected, atol=2e-2, rtol=2e-2)
                everyones = tp.all_gather(total[None], 0)
                assert torch.equal(everyones, total.expand_as(everyones)), "ranks differ"
    torch.cuda.synchronize()
    distributed.barrier()
    print("done", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
