"""The rehearsal before serving launches every attention kernel, specialised as later steps launch it. Needs no GPU.

Specialised: with the same missing pointers, arguments that are multiples of 16 or equal to 1, and compile-time values.
A model on the CPU attends with Triton's backend, whose launches are recorded in place of being executed.
"""

from pathlib import Path

import pytest

from tests.support.compiled_kernels import needs_triton, run_script

SCRIPT = """
import sys

from engine.interface.config import EngineConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from engine.startup import load as loading
from engine.startup.limits import sharing_rates
from engine.startup.setup import Setup
from kernels.attention.triton_backend import TritonAttention
from tests.support.fake_graphs import FakeGraphDevice, capture_on

loading._select_backend = lambda *args, **options: TritonAttention()
Setup.sharing = property(lambda self: sharing_rates(self.rank_share, self.kv_dtype))  # as on a GPU
config = EngineConfig(
    model=sys.argv[1], block_size=16, max_num_batched_tokens=2048, max_num_seqs=130, device="cpu", kv_cache_dtype="auto"
)


def describe(kernels):
    return {
        f"{kernel.function.__name__} {kernel.constants} {kernel.signature} {kernel.attributes} {kernel.options}"
        for kernel in kernels
    }


def make_device(engine):
    device = FakeGraphDevice(engine.loaded.model_config.hidden_size, max_rows=300)
    device.runs = True
    return device


with collect_kernels() as kernels:
    engine = OfflineEngine.load(config)
    runner = engine.loaded.runner
    runner.plan_graphs(make_device(engine), layers=engine.loaded.model_config.layers_of_each_kind).warm_up()
    OfflineEngine.load(config).run_workload()
rehearsed = describe(kernels)

with collect_kernels() as kernels:
    engine = OfflineEngine.load(config)
    capture_on(engine, make_device(engine), is_partial=False)
    engine.self_test()
    params = [SamplingParams(max_tokens=20, temperature=i % 2, top_p=0.9, seed=i) for i in range(60)]
    engine.generate([[7] * (1 + 40 * i) for i in range(60)], params)
launched = describe(kernels)
assert sum(text.startswith("_shared_kernel") for text in launched) == 3, launched
print(*sorted(launched - rehearsed), sep="\\n")
"""


@needs_triton
@pytest.mark.full
def test_steps_launch_no_attention_kernel_that_the_rehearsal_did_not(tmp_path: Path) -> None:
    from tests.support.tiny_llama import save_tiny_llama

    (tmp_path / "model").mkdir()
    folder = save_tiny_llama(tmp_path / "model")
    run = run_script(SCRIPT, str(folder), cache=tmp_path / "cache")
    assert run.stdout.split() == []
