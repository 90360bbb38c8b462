"""One rank of test_one_shot_all_reduce_cuda: sums in kernels of our own are the specification's, in graphs and without.

Usage: python -m tests.gpu.one_shot_all_reduce_rank RANK SIZE RENDEZVOUS
"""

import faulthandler
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from engine.tensor_parallel.process_group import join_ranks
from kernels.all_reduce.reference import sum_add_rms_norm, sum_parts
from models.parallel import OneShotAllReduce, TensorParallel

WIDTH = 4096
EPS = 1e-5
NUM_CALLS = 200
# More rows than a GPU has multiprocessors; sizes that fill no block; few rows after many and the other way round
SHAPES = ((1, 4096), (256, 1024), (8, 4096), (3, 1000), (200, 4096), (133, 64), (64, 4096), (16, 2056))
GRAPH_SHAPES = ((1, 4096), (140, 1024), (1, 4096), (32, 4096), (7, 8))


def main(rank: int, size: int, rendezvous: str) -> None:
    faulthandler.dump_traceback_later(60)
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    tp = join_ranks(rank=rank, size=size, rendezvous=rendezvous, device=device, hidden_size=WIDTH)
    assert tp.one_shot_all_reduce is not None, "these GPUs do not reach each other"
    Rank(tp, tp.one_shot_all_reduce, device).run()
    torch.cuda.synchronize()
    tp.all_reduce(torch.zeros(1, device=device))
    torch.cuda.synchronize()


class Rank:
    """Makes the same calls as every other, with parts of its own."""

    def __init__(self, tp: TensorParallel, sums: OneShotAllReduce, device: torch.device) -> None:
        self.tp = tp
        self.sums = sums
        self.device = device
        self.own = torch.Generator(device).manual_seed(100 + tp.rank)
        self.common = torch.Generator(device).manual_seed(1)
        self.choice = random.Random(7)

    def run(self) -> None:
        """NUM_CALLS calls, every tenth of which is a replay of a graph of five."""
        x, replay = self.capture()
        for call in range(NUM_CALLS):
            if call % 10 == 9:
                self.check_replay(x, replay)
            else:
                self.check_call(self.choice.choice(SHAPES), has_norm=self.choice.random() < 0.7)

    def check_call(self, shape: tuple[int, int], *, has_norm: bool) -> None:
        is_half = shape[1] == 1024 and self.choice.random() < 0.5
        dtype = torch.float16 if is_half else torch.bfloat16
        x = self.part(shape, dtype)
        if not self.sums.takes(x):  # with more ranks fewer rows
            x = x[:8].contiguous()
        parts = self.tp.all_gather(x[None], 0)
        if not has_norm:
            self.compare(self.sums.all_reduce(x), sum_parts(parts), is_exact=True)
            return
        residual, weight = self.shared(x.shape, dtype), self.shared((x.shape[1],), dtype)
        if shape == (64, 4096):
            weight = weight.float()
        expected = sum_add_rms_norm(parts, residual, weight, EPS)
        outputs = self.sums.add_rms_norm(x, residual, weight, EPS)
        self.compare(outputs[0], expected[0])
        self.compare(outputs[1], expected[1], is_exact=True)

    def capture(self) -> tuple[list[torch.Tensor], Callable[[], list[Any]]]:
        """A graph of sums of one set of inputs; → ([x], replay → [(x, residual, weight, outputs)])."""
        inputs = []
        for shape in GRAPH_SHAPES:
            x = self.part(shape, torch.bfloat16)
            inputs.append((x, self.shared(shape, x.dtype), self.shared((shape[1],), x.dtype)))
            self.sums.add_rms_norm(*inputs[-1], EPS)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = [self.sums.add_rms_norm(*arguments, EPS) for arguments in inputs]

        def replay() -> list[Any]:
            for _ in range(3):
                graph.replay()
            return [(*arguments, made) for arguments, made in zip(inputs, outputs, strict=True)]

        return [x for x, _, _ in inputs], replay

    def check_replay(self, inputs: list[torch.Tensor], replay: Callable[[], list[Any]]) -> None:
        for x in inputs:
            x.copy_(self.part(x.shape, x.dtype))
        for x, residual, weight, outputs in replay():
            expected = sum_add_rms_norm(self.tp.all_gather(x[None], 0), residual, weight, EPS)
            self.compare(outputs[0], expected[0])
            self.compare(outputs[1], expected[1], is_exact=True)

    def compare(self, out: torch.Tensor, expected: torch.Tensor, *, is_exact: bool = False) -> None:
        """Additions are those of the specification to the bit; a norm's sum of squares has an order of its own."""
        tolerance = 0.0 if is_exact else 2e-2
        torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
        everyones = self.tp.all_gather(out.view(torch.uint8)[None], 0)
        assert torch.equal(everyones, everyones[:1].expand_as(everyones)), "ranks differ"

    def part(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """This rank's own; with zeros of both signs."""
        x = torch.randn(shape, generator=self.own, device=self.device).to(dtype)
        x[:, ::17] = -0.0
        x[:, 3::19] = 0.0
        return x

    def shared(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """What every rank has."""
        return torch.randn(shape, generator=self.common, device=self.device).to(dtype)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
