"""Every architecture gives transformers' logits, however its tokens are cut into steps."""

import pytest
import torch
from safetensors.torch import load_file

from kernels.elementwise import reference as elementwise
from models.config.model_config import ModelConfig
from models.layers import attention, norm
from tests.support.checkpoints import make_config, make_configs
from tests.support.models_harness import PagedRunner, load
from tests.support.reference import LOGITS_ERROR, reference_logits, save_checkpoint

pytestmark = pytest.mark.slow

KINDS = list(make_configs())
_FIRST = {type(config): kind for kind, config in reversed(make_configs().items())}
# make test cuts the prompt for one checkpoint of each family; the others have the same layers, and are read whole
IN_CUTS = [kind if kind in _FIRST.values() else pytest.param(kind, marks=pytest.mark.full) for kind in KINDS]
TOLERANCE = 1e-4
PROMPT = torch.randint(0, 97, (29,), generator=torch.Generator().manual_seed(7)).tolist()
OTHERS = [PROMPT[5:16], PROMPT[::-1], PROMPT[3:6]]


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_checkpoint(folder, make_config(request.param))
    return folder


@pytest.fixture(scope="module")
def model(checkpoint):
    return load(checkpoint)


@pytest.fixture(scope="module")
def expected(checkpoint):
    return reference_logits(checkpoint, PROMPT)


@pytest.fixture
def runner(checkpoint, model):
    return PagedRunner(model, ModelConfig.from_folder(checkpoint))


@pytest.fixture
def assert_close(record_property):
    """A comparison that leaves the error in the report, for tests/models_page.py."""

    def compare(logits, expected):
        record_property(LOGITS_ERROR, (logits - expected).abs().max().item())
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)

    return compare


def test_whole_prefill_matches_transformers(runner, expected, assert_close):
    row = runner.add_row()
    assert_close(runner.step([(row, PROMPT)])[0], expected)
    assert expected.std() > 0.5  # flat logits would hide errors


@pytest.mark.parametrize("checkpoint", IN_CUTS, indirect=True)
def test_chunked_prefill_matches_transformers(runner, expected, assert_close):
    row, start, logits = runner.add_row(), 0, []
    for num_tokens in (5, 1, 7, 2, 14):
        logits += runner.step([(row, PROMPT[start : start + num_tokens])])
        start += num_tokens
    assert_close(torch.cat(logits), expected)


@pytest.mark.parametrize("checkpoint", IN_CUTS, indirect=True)
def test_decode_token_by_token_matches_transformers(runner, expected, assert_close):
    """From the first one on, and behind a prompt that is longer than a window."""
    row = runner.add_row()
    pieces = [[token_id] for token_id in PROMPT]
    pieces[3:22] = [PROMPT[3:22]]
    logits = [runner.step([(row, piece)])[0] for piece in pieces]
    assert_close(torch.cat(logits), expected)


@pytest.mark.table(most=8)
def test_ragged_rows_do_not_disturb_each_other(runner, expected, checkpoint, assert_close):
    prompts = [PROMPT, *OTHERS]
    references = [expected] + [reference_logits(checkpoint, prompt) for prompt in OTHERS]
    rows = [runner.add_row() for _ in prompts]
    collected = [[] for _ in prompts]
    # Lengths of each row's chunk per step; decode rows (1) need not be the same rows in every step
    for lengths in ((9, 4, 0, 2), (0, 1, 6, 1), (1, 2, 23, 0), (19, 4, 0, 0)):
        planned = [(row, n) for row, n in zip(rows, lengths, strict=True) if n > 0]
        chunks = []
        for row, n in sorted(planned, key=lambda pair: pair[1] > 1):
            start = sum(len(part) for part in collected[row])
            chunks.append((row, prompts[row][start : start + n]))
        for (row, _), logits in zip(chunks, runner.step(chunks), strict=True):
            collected[row].append(logits)
    for parts, reference in zip(collected, references, strict=True):
        assert_close(torch.cat(parts), reference)


@pytest.mark.parametrize("kind", ["llama4", "llama4_no_norm"])
def test_a_text_over_many_chunks_of_attention_matches_transformers(kind, tmp_path, assert_close):
    config = make_config(kind)
    config.max_position_embeddings = 160
    save_checkpoint(tmp_path, config)
    text = torch.randint(0, 97, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    runner = PagedRunner(load(tmp_path), ModelConfig.from_folder(tmp_path))
    row, start, logits = runner.add_row(), 0, []
    for num_tokens in (33, 1, 5, 64, 1, 1, 40, 5):
        logits += runner.step([(row, text[start : start + num_tokens])])
        start += num_tokens
    assert_close(torch.cat(logits), reference_logits(tmp_path, text))


def test_num_parameters_counts_what_the_checkpoint_holds(checkpoint):
    stored = sum(tensor.numel() for tensor in load_file(checkpoint / "model.safetensors").values())
    assert ModelConfig.from_folder(checkpoint).num_parameters == stored


# These compute update strengths, time steps and gated norms in fp32, which transformers rounds in between; latent
# attention multiplies queries by the matrix by which transformers multiplies keys
_HEADS = ("linear_num_key_heads", "mamba_n_heads", "mamba_num_heads", "kv_lora_rank")
ROUNDED_ELSEWHERE = [kind for kind, config in make_configs().items() if any(hasattr(config, name) for name in _HEADS)]
# Published routers of MiniMax-M2 are fp32 and stay so, where transformers rounds them
ROUNDED_ELSEWHERE += ["minimax_m2", "minimax_m2_rotary_dim"]
# The reference of these is not sdpa, and rounds the products of queries and keys, which a cap hides
EAGER = ["gemma2_uncapped", "gpt_oss"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (*EAGER, *ROUNDED_ELSEWHERE)])
@pytest.mark.table(most=8)
def test_bf16_rounds_where_transformers_rounds(kind, tmp_path, monkeypatch):
    for module, name in ((norm, "rms_norm"), (norm, "add_rms_norm"), (attention, "norm_rope_write_kv")):
        monkeypatch.setattr(module, name, getattr(elementwise, name))  # the CPU's own round less often
    save_checkpoint(tmp_path, make_config(kind))
    exact = reference_logits(tmp_path, PROMPT)
    expected = reference_logits(tmp_path, PROMPT, dtype=torch.bfloat16).float()
    runner = PagedRunner(load(tmp_path, dtype=torch.bfloat16), ModelConfig.from_folder(tmp_path), dtype=torch.bfloat16)
    logits = runner.step([(runner.add_row(), PROMPT)])[0].float()
    # Equal bit for bit where the attention kernels agree; a rounding in another place costs as much as bf16 itself
    assert (logits - expected).abs().max() < 0.3 * (exact - expected).abs().max()


@pytest.mark.parametrize("kind", ROUNDED_ELSEWHERE)
@pytest.mark.table(most=2)
def test_bf16_errs_no_more_than_transformers(kind, tmp_path):
    save_checkpoint(tmp_path, make_config(kind))
    exact = reference_logits(tmp_path, PROMPT)
    expected = reference_logits(tmp_path, PROMPT, dtype=torch.bfloat16).float()
    runner = PagedRunner(load(tmp_path, dtype=torch.bfloat16), ModelConfig.from_folder(tmp_path), dtype=torch.bfloat16)
    logits = runner.step([(runner.add_row(), PROMPT)])[0].float()
    # Not the largest error: where roundings choose another expert, a token errs by what the experts differ
    assert (logits - exact).abs().median() < 1.2 * (expected - exact).abs().median()
