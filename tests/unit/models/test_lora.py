"""A model with adapters gives the logits of the checkpoints into which they are merged, however rows are mixed."""

import math

import pytest
import torch
from safetensors.torch import load_file

from kernels.ops import LoraTokens
from models.config.model_config import ModelConfig
from models.lora.adapter import Adapter
from models.lora.linear import AdapterStack, check_adapters
from models.parallel import TensorParallel
from tests.support.checkpoints import make_config, make_configs
from tests.support.lora_adapters import (
    ATTENTION,
    DELTA_NET,
    HYBRID,
    KIMI,
    MERGED,
    MLP,
    adapter_config,
    make_tensors,
    modules,
    save_adapter,
    save_merged,
)
from tests.support.lora_rank import run_rank
from tests.support.models_harness import CPU, PagedRunner, load
from tests.support.rank_group import run_ranks
from tests.support.reference import reference_logits, save_checkpoint

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
PROMPT = torch.randint(0, 97, (29,), generator=torch.Generator().manual_seed(7)).tolist()
KINDS = list(make_configs())


def projections(base):
    """Those that every layer of a checkpoint stores on their own; of attention and its like, that some layers do."""
    stored = load_file(base / "model.safetensors")
    mixers, others = (dict.fromkeys(names) for names in (ATTENTION + DELTA_NET + HYBRID + KIMI, MLP + MERGED))
    places = {name: modules([name], range(5), root=root_of(base)) for name in mixers}
    some = [name for name in mixers if any(f"{module}.weight" in stored for module in places[name])]
    return some + [name for name in others if all(f"{module}.weight" in stored for module in modules([name]))]


def root_of(base):
    return ModelConfig.from_folder(base).body_prefix


def runner_of(base, adapters, *, dtype=torch.float32):
    tokens = LoraTokens(num_adapters=len(adapters), max_tokens=256, device=CPU)
    model = load(base, dtype=dtype, adapters=AdapterStack(adapters, tokens))
    return PagedRunner(model, ModelConfig.from_folder(base), dtype=dtype, lora_tokens=tokens)


def assert_close(logits, expected):
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.table(most=8)
def test_every_family_gives_the_merged_logits_in_chunks_and_decoding(kind, tmp_path):
    base = tmp_path / "base"
    save_checkpoint(base, make_config(kind))
    names = projections(base)
    stored = load_file(base / "model.safetensors")
    layers = range(ModelConfig.from_folder(base).num_layers)
    changed = [module for module in modules(names, layers, root=root_of(base)) if f"{module}.weight" in stored]
    tensors = make_tensors(base, dict.fromkeys(changed, 4))
    targets = [name.rpartition(".")[2] for name in names]
    folder = save_adapter(tmp_path / "adapter", tensors, adapter_config(target_modules=targets))
    merged = save_merged(tmp_path / "merged", base, tensors, 2.0)
    expected, plain = reference_logits(merged, PROMPT), reference_logits(base, PROMPT)
    assert (expected - plain).abs().max() > 0.3  # an adapter without effect would hide errors
    adapters = [Adapter("a", folder)]
    assert check_adapters(adapters, ModelConfig.from_folder(base), dtype=torch.float32, tp=TensorParallel()) > 0
    runner = runner_of(base, adapters)
    adapted, row, start, logits = runner.add_row(1), runner.add_row(), 0, []
    for num_tokens in (5, 1, 7, 2, 11, 1, 1, 1):
        logits += runner.step([(adapted, PROMPT[start : start + num_tokens])])
        start += num_tokens
    assert_close(torch.cat(logits), expected)
    assert_close(runner.step([(row, PROMPT)])[0], plain)


@pytest.mark.parametrize("kind", ["kimi_linear", "kimi_linear_groups"])
def test_adapters_of_kimi_linear_have_the_names_of_transformers_modules(kind, tmp_path):
    base = tmp_path / "base"
    save_checkpoint(base, make_config(kind))
    kinds = ("_proj.weight", "_with_mqa.weight")
    changed = [name.removesuffix(".weight") for name in load_file(base / "model.safetensors") if name.endswith(kinds)]
    changed = [name for name in changed if "kv_b_proj" not in name]
    tensors = make_tensors(base, dict.fromkeys(changed, 4))
    merged = save_merged(tmp_path / "merged", base, tensors, 2.0)
    expected = reference_logits(merged, PROMPT)
    assert (expected - reference_logits(base, PROMPT)).abs().max() > 0.3
    for stored, runtime in ((".block_sparse_moe.", ".mlp."), (".f_", ".forget_gate.f_")):
        tensors = {name.replace(stored, runtime): tensor for name, tensor in tensors.items()}
    for part in (".mlp.down_proj.", ".mlp.shared_experts.down_proj.", ".self_attn.forget_gate.f_b_proj."):
        assert any(part in name for name in tensors)
    config = adapter_config(target_modules=sorted({name.rpartition(".")[2] for name in changed}))
    adapters = [Adapter("a", save_adapter(tmp_path / "adapter", tensors, config))]
    check_adapters(adapters, ModelConfig.from_folder(base), dtype=torch.float32, tp=TensorParallel())
    runner = runner_of(base, adapters)
    assert_close(runner.step([(runner.add_row(1), PROMPT)])[0], expected)


@pytest.fixture(scope="module", params=["llama3.1", "qwen3"])
def three(request, tmp_path_factory):
    """A checkpoint, three adapters of it that differ in all they may, and the logits of each when merged."""
    root = tmp_path_factory.mktemp(request.param)
    base = root / "base"
    save_checkpoint(base, make_config(request.param))
    everything = dict.fromkeys(modules(ATTENTION + MLP), 4)
    some = dict.fromkeys(modules(("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")), 20)
    last = {module: 8 if "o_proj" in module else 3 for module in modules(("self_attn.o_proj", "mlp.down_proj"), [2])}
    last_config = adapter_config(
        r=3,
        target_modules=["o_proj", "down_proj"],
        layers_to_transform=[2],
        use_rslora=True,
        rank_pattern={"o_proj": 8},
        alpha_pattern={r"layers\.2\.mlp\.down_proj": 5},
    )
    last_scales = {module: 8 / math.sqrt(8) if "o_proj" in module else 5 / math.sqrt(3) for module in last}
    made = [
        (everything, adapter_config(target_modules="all-linear"), 2.0),
        (some, adapter_config(r=20, lora_alpha=10, target_modules=r".*\.(q_proj|v_proj|up_proj)"), 0.5),
        (last, last_config, last_scales),
    ]
    adapters, expected = [], [reference_logits(base, PROMPT)]
    for index, (ranks, config, scales) in enumerate(made):
        tensors = make_tensors(base, ranks, seed=index)
        adapters.append(Adapter(f"a{index}", save_adapter(root / f"a{index}", tensors, config)))
        expected.append(reference_logits(save_merged(root / f"m{index}", base, tensors, scales), PROMPT))
    return base, adapters, expected


def test_rows_of_all_adapters_and_the_model_itself_are_computed_in_one_step(three):
    base, adapters, expected = three
    runner = runner_of(base, adapters)
    owners = [0, 1, 2, 3, 1, 0]
    rows = [runner.add_row(owner) for owner in owners]
    collected = [[] for _ in rows]
    for lengths in ((1, 3, 9, 1, 0, 20), (1, 1, 1, 0, 7, 1), (1, 1, 1, 1, 1, 1), (26, 24, 18, 27, 21, 7)):
        planned = sorted(((row, n) for row, n in zip(rows, lengths, strict=True) if n), key=lambda pair: pair[1] > 1)
        chunks = []
        for row, n in planned:
            start = sum(len(part) for part in collected[row])
            chunks.append((row, PROMPT[start : start + n]))
        for (row, _), logits in zip(chunks, runner.step(chunks), strict=True):
            collected[row].append(logits)
    for owner, parts in zip(owners, collected, strict=True):
        assert_close(torch.cat(parts), expected[owner])
    for first in range(4):
        for second in range(first):
            assert (expected[first] - expected[second]).abs().max() > 0.1


def test_a_model_without_adapters_has_no_wrapper(three):
    base, adapters, _ = three
    plain, adapted = load(base), runner_of(base, adapters).model
    kinds = [
        {type(module.method).__name__ for module in m.modules() if hasattr(module, "method")} for m in (plain, adapted)
    ]
    assert kinds == [{"Unquantized"}, {"LoraLinear"}]


def test_bf16_adapters_stay_near_the_merged_model(three):
    base, adapters, expected = three
    runner = runner_of(base, adapters, dtype=torch.bfloat16)
    logits = runner.step([(runner.add_row(1), PROMPT)])[0].float()
    spread = (reference_logits(base, PROMPT, dtype=torch.bfloat16).float() - expected[0]).abs().max()
    assert (logits - expected[1]).abs().max() < 3 * spread


def test_bytes_are_told_from_shapes_alone(three):
    base, adapters, _ = three
    stack = AdapterStack(adapters, LoraTokens(num_adapters=3, max_tokens=1, device=CPU))
    load(base, adapters=stack)
    config = ModelConfig.from_folder(base)
    assert check_adapters(adapters, config, dtype=torch.float32, tp=TensorParallel()) == stack.num_bytes > 0


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.full) for size in (4, 8))])
@pytest.mark.parametrize("kind", ["llama3.1", "llama_all_biases", "qwen3", "phi3"])
@pytest.mark.slow
def test_split_over_ranks_every_adapter_gives_the_logits_of_the_whole(kind, size, tmp_path):
    base = tmp_path / "base"
    config = make_config(kind)
    config.num_attention_heads = max(size, config.num_attention_heads)
    save_checkpoint(base, config)
    names = projections(base)
    folders = []
    for index, chosen in enumerate([names, names[-1:] + names[:1]]):
        tensors = make_tensors(base, dict.fromkeys(modules(chosen), 4 + index), seed=index)
        targets = [name.rpartition(".")[2] for name in chosen]
        config = adapter_config(r=4 + index, target_modules=targets)
        folders.append(save_adapter(tmp_path / f"a{index}", tensors, config))
    run_ranks(run_rank, size, tmp_path / "store", base, folders)
    runner = runner_of(base, [Adapter(folder.name, folder) for folder in folders])
    expected = runner.step([(runner.add_row(owner), PROMPT) for owner in (0, 1, 2)])
    for rank in range(size):
        assert_close(torch.load(base / f"logits-{rank}.pt"), torch.cat(expected))
