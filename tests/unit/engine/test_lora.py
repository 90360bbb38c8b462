"""The whole engine with adapters: each request gets its own adapter's text, whatever runs beside it."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.core.engine import Engine
from engine.core.kv_caches import KvCaches
from engine.core.local_client import LocalTransport, generate
from engine.core.request import Request
from engine.interface.config import EngineConfig, LoraSource, SchedulerConfig
from engine.interface.errors import StartupError
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from tests.support.lora_adapters import ATTENTION, MLP, adapter_config, make_tensors, modules, save_adapter, save_merged
from tests.support.tiny_llama import save_tiny_llama
from tests.unit.engine.test_real_model import make_engine, prompts, tokens

GREEDY = SamplingParams(max_tokens=24, temperature=0.0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters of different ranks and targets."""
    root = tmp_path_factory.mktemp("adapters")
    folders = []
    for index, names in enumerate([ATTENTION + MLP, ("self_attn.q_proj", "self_attn.v_proj")]):
        rank = (4, 17)[index]
        tensors = make_tensors(base, dict.fromkeys(modules(names, [0, 1]), rank), seed=index)
        targets = [name.rpartition(".")[2] for name in names]
        config = adapter_config(r=rank, lora_alpha=6 * rank, target_modules=targets)
        folders.append(save_adapter(root / f"a{index}", tensors, config))
        save_merged(root / f"merged{index}", base, tensors, 6.0)
    return folders


def make(base: Path, folders: list[Path], **changes: object) -> tuple[Engine, LocalTransport]:
    sources = [LoraSource(folder.name, str(folder)) for folder in folders]
    return make_engine(base, loras=sources, **changes)


def merged_texts(base: Path, folders: list[Path], inputs: list[list[int]]) -> list[list[list[int]]]:
    """By lora_index, then by prompt: what transformers says, with the weights merged."""
    texts = []
    for folder in [base, *(folder.parent / f"merged{index}" for index, folder in enumerate(folders))]:
        model = LlamaForCausalLM.from_pretrained(folder).eval()
        options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
        texts.append([model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in inputs])
    return texts


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("pool_blocks", [None, 30])
@pytest.mark.slow
@pytest.mark.table
def test_a_mixed_batch_gives_the_text_of_merged_weights(
    base: Path,
    adapters: list[Path],
    depth: int,
    pool_blocks: int | None,
) -> None:
    inputs = prompts(5, 17, 30, 40)
    expected = merged_texts(base, adapters, inputs)
    assert expected[0] != expected[1] != expected[2] != expected[0]
    changes: dict[str, object] = {"overlap_depth": depth}
    if pool_blocks is not None:  # too few for all, so that some are preempted
        bytes_per_block = 2 * 2 * 2 * 16 * 4 * 4
        changes |= {"kv_cache_memory_bytes": pool_blocks * bytes_per_block, "max_model_len": 100}
    engine, transport = make(base, adapters, **changes)
    owners = [0, 1, 2] * 4
    mixed = [prompt for prompt in inputs for _ in range(3)]
    for _ in range(2):  # the second time with what the first left in the prefix cache
        found = tokens(generate(engine, transport, mixed, [GREEDY] * 12, lora_indices=owners))
        assert found == [expected[owner][index // 3] for index, owner in enumerate(owners)]
    assert (engine.scheduler.num_preemptions > 0) == (pool_blocks is not None)
    assert engine.scheduler.kv.pool.num_used == 0


def test_a_quantized_model_takes_adapters(base: Path, adapters: list[Path]) -> None:
    inputs = prompts(17, 30)
    engine, transport = make(base, adapters, quantization="fp8")
    owners = [0, 1, 2] * 2
    mixed = [prompt for prompt in inputs for _ in range(3)]
    found = tokens(generate(engine, transport, mixed, [GREEDY] * 6, lora_indices=owners))
    alone = [
        tokens(generate(engine, transport, [prompt], [GREEDY], lora_indices=[owner]))[0]
        for prompt, owner in zip(mixed, owners, strict=True)
    ]
    assert found == alone
    assert found[0] != found[1] != found[2] != found[0]


def test_cached_prefixes_are_found_by_the_same_adapter_alone(base: Path, adapters: list[Path]) -> None:
    engine, transport = make(base, adapters)
    (prompt,) = prompts(40)
    cached = []
    for owner in (1, 0, 2, 1, 0, 2):
        (generation,) = generate(engine, transport, [prompt], [GREEDY], lora_indices=[owner])
        cached.append(generation.num_cached_tokens)
    assert cached == [0, 0, 0, 36, 36, 36]


@pytest.mark.parametrize("block_size", [1, 4])
def test_no_salt_and_no_tokens_make_one_adapters_hashes_anothers(block_size: int) -> None:
    config = SchedulerConfig(
        num_pages=40, block_size=block_size, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64
    )
    token_ids = [1, 2, 3, 4] * 4
    seen: set[bytes] = set()
    count = 0
    for lora_index in (0, 1, 2, 10):
        for salt in ("", "1", "adapter 1: ", "adapter 1"):
            kv = KvCaches(config)
            for first in range(4):
                request = Request("r", token_ids[first:], GREEDY, cache_salt=salt, lora_index=lora_index)
                kv.admit(request)
                seen.update(request.block_hashes)
                count += len(request.block_hashes)
                kv.free(request)
    assert len(seen) == count


def test_an_adapter_that_is_not_there_fails_its_request_alone(base: Path, adapters: list[Path]) -> None:
    engine, transport = make(base, adapters)
    found = generate(engine, transport, prompts(5, 5, 5), [GREEDY] * 3, lora_indices=[3, 0, -1])
    assert [generation.error and generation.error.code for generation in found] == [
        "invalid_parameter",
        None,
        "invalid_parameter",
    ]


def test_a_row_used_before_by_an_adapter_is_the_models_again(base: Path, adapters: list[Path]) -> None:
    engine, transport = make(base, adapters, max_num_seqs=1)
    inputs = prompts(9)
    expected = merged_texts(base, adapters, inputs)
    owners = [1, 0, 2, 0]
    found = tokens(generate(engine, transport, inputs * 4, [GREEDY] * 4, lora_indices=owners))
    assert found == [expected[owner][0] for owner in owners]


def test_scores_of_a_prompt_are_its_adapters(base: Path, adapters: list[Path]) -> None:
    engine, transport = make(base, adapters)
    (prompt,) = prompts(30)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    for owner, folder in ((0, base), (1, adapters[0].parent / "merged0")):
        (generation,) = generate(engine, transport, [prompt], [params], lora_indices=[owner])
        with torch.inference_mode():
            logits = LlamaForCausalLM.from_pretrained(folder).eval()(torch.tensor([prompt])).logits[0]
        expected = logits[:-1].log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None]).squeeze(1).tolist()
        assert [entry.logprob for entry in generation.prompt_logprobs] == pytest.approx(expected, abs=1e-4)


def test_the_panel_and_the_self_test_know_the_adapters(base: Path, adapters: list[Path]) -> None:
    sources = [LoraSource("sql", str(adapters[0])), LoraSource("poems", str(adapters[1]))]
    offline = OfflineEngine.load(EngineConfig(model=str(base), device="cpu", loras=sources))
    assert offline.loaded.facts["Adapters"].startswith("sql, poems (")
    offline.self_test()


def test_an_adapter_of_another_model_stops_the_start_before_weights_are_read(
    base: Path,
    tmp_path: Path,
) -> None:
    tensors = make_tensors(base, {"model.layers.0.self_attn.q_proj": 4})
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    tensors[name] = torch.zeros(4, 96)
    folder = save_adapter(tmp_path / "a", tensors, adapter_config(target_modules=["q_proj"], layers_to_transform=[0]))
    stages = []
    config = EngineConfig(model=str(base), device="cpu", loras=[LoraSource("a", str(folder))])
    with pytest.raises(StartupError) as error:
        OfflineEngine.load(config, stages.append)
    assert all(part in error.value.message for part in ("adapter_model.safetensors", name, "[4, 96]", "[4, 64]"))
    assert [stage.name for stage in stages] == ["config"]
