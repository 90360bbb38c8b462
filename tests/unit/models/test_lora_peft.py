"""Adapters that PEFT itself made and saved give PEFT's own logits. Runs where the package peft is installed."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from kernels.ops import LoraTokens
from models.config.model_config import ModelConfig
from models.lora.adapter import Adapter
from models.lora.linear import AdapterStack, check_adapters
from models.parallel import TensorParallel
from tests.support.checkpoints import make_config
from tests.support.models_harness import CPU, PagedRunner, load
from tests.support.reference import save_checkpoint
from tests.unit.models.test_text_part import make_gemma, make_mistral

peft = pytest.importorskip("peft")

PROMPT = torch.randint(0, 97, (29,), generator=torch.Generator().manual_seed(7)).tolist()
OPTIONS = {
    "names": {"target_modules": ["q_proj", "v_proj", "down_proj"], "r": 5, "lora_alpha": 10},
    "all": {"target_modules": "all-linear", "r": 4, "lora_alpha": 4, "use_rslora": True},
    "regex": {"target_modules": r".*\.layers\.[02]\.(self_attn|mlp)\..*_proj", "r": 3, "lora_alpha": 9},
    "patterns": {
        "target_modules": "all-linear",
        "exclude_modules": ["o_proj"],
        "r": 4,
        "lora_alpha": 8,
        "rank_pattern": {"down_proj": 9, r"layers\.1\.mlp\.up_proj": 2, "layers.0.self_attn.qkv_proj": 3},
        "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 1, "gate_up_proj": 20},
    },
    "layers": {"target_modules": ["v_proj", "o_proj"], "layers_to_transform": [1], "r": 6, "lora_alpha": 3},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", ["llama3.1", "qwen3", "phi3"])
def test_what_peft_saves_gives_what_peft_computes(kind, option, tmp_path):
    save_checkpoint(tmp_path / "base", make_config(kind))
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **OPTIONS[option])
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()
    with torch.inference_mode():
        plain = base(torch.tensor([PROMPT])).logits[0].clone()
    try:
        model = peft.get_peft_model(base, config).eval()
    except ValueError as error:
        pytest.skip(f"not for this model: {error}")
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.2)
        expected = model(torch.tensor([PROMPT])).logits[0]
    assert (expected - plain).abs().max() > 0.1
    model.save_pretrained(tmp_path / "adapter")
    assert_served(tmp_path, expected)


@pytest.mark.parametrize("make", [make_gemma, make_mistral])
def test_the_text_of_a_model_that_also_sees_takes_adapters(make, tmp_path):
    torch.manual_seed(0)
    base = make().eval()
    targets = r".*language_model.*\.(q_proj|o_proj|up_proj|down_proj)"
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets, init_lora_weights=False)
    with torch.inference_mode():
        for parameter in base.parameters():
            parameter.normal_(0.0, 0.2)
        base.save_pretrained(tmp_path / "base")
        model = peft.get_peft_model(base, config).eval()
        expected = model(torch.tensor([PROMPT])).logits[0]
    model.save_pretrained(tmp_path / "adapter")
    assert_served(tmp_path, expected)


def assert_served(root, expected):
    """The checkpoint in root/base with the adapter in root/adapter gives these logits, in two chunks."""
    tokens = LoraTokens(num_adapters=1, max_tokens=64, device=CPU)
    adapters = [Adapter("a", root / "adapter")]
    config = ModelConfig.from_folder(root / "base")
    assert check_adapters(adapters, config, dtype=torch.float32, tp=TensorParallel()) > 0
    runner = PagedRunner(load(root / "base", adapters=AdapterStack(adapters, tokens)), config, lora_tokens=tokens)
    row = runner.add_row(1)
    logits = torch.cat(runner.step([(row, PROMPT[:20])]) + runner.step([(row, PROMPT[20:])]))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
