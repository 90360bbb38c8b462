"""Models loaded straight onto the GPU give transformers' logits there too."""

import pytest
import torch
import transformers
from packaging.version import Version

from models.build import build
from models.config.model_config import ModelConfig
from models.parallel import TensorParallel
from models.weights.weights import Weights
from tests.support.checkpoints import make_config, make_configs
from tests.support.models_harness import PagedRunner, load
from tests.support.reference import reference_logits, save_checkpoint

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
# Fields of these configs that transformers 5.17 does not read: on the CPU its logits differ from those of 5.23, too
IGNORED = {
    "gpt_oss": "swiglu_limit",
    "granite_hybrid_dense": "the norm's groups",
    "bamba_biases": "the norm's groups",
    "minimax_m2_rotary_dim": "rotary_dim",
    "mistral4": "the text part alone",
    "mistral4_groups": "the text part alone",
}
PROMPT = torch.randint(0, 97, (29,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.mark.parametrize("kind", list(make_configs()))
def test_prefill_and_decode_match_transformers_on_the_cpu(kind, tmp_path):
    config = make_config(kind)
    if kind == "gemma" and config.hidden_act == "gelu":
        pytest.skip("this transformers takes the legacy name by its letter, later ones as the tanh approximation")
    if kind in IGNORED and Version(transformers.__version__) < Version("5.18"):
        pytest.skip("this transformers takes no notice of " + IGNORED[kind])
    save_checkpoint(tmp_path, config)
    runner = PagedRunner(load(tmp_path, device=CUDA), ModelConfig.from_folder(tmp_path), device=CUDA)
    row, other = runner.add_row(), runner.add_row()
    logits = runner.step([(row, PROMPT[:13])]) + runner.step([(row, PROMPT[13:14]), (other, PROMPT[:5])])[:1]
    logits += [runner.step([(row, [token_id]), (other, [token_id])])[0] for token_id in PROMPT[14:17]]
    logits += runner.step([(row, PROMPT[17:])])
    torch.testing.assert_close(torch.cat(logits), reference_logits(tmp_path, PROMPT), atol=2e-4, rtol=0)


def test_dummy_weights_are_made_on_the_device(tmp_path):
    save_checkpoint(tmp_path, make_config("qwen3"))
    config = ModelConfig.from_folder(tmp_path)
    w = Weights.dummy(device=CUDA, dtype=torch.bfloat16)
    runner = PagedRunner(build(config, w, TensorParallel()), config, device=CUDA, dtype=torch.bfloat16)
    logits = runner.step([(runner.add_row(), PROMPT)])[0]
    assert logits.isfinite().all()
    assert torch.equal((w / "a").tensor("weight", (64, 8)), (w / "a").tensor("weight", (64, 8)))
