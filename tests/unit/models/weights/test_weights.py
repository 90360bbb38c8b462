"""A checkpoint is read whole and exactly, or refused with a sentence that says what is wrong with it."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from models.build import build
from models.config.model_config import ModelConfig, ModelError
from models.parallel import TensorParallel
from models.weights.weights import Weights
from tests.support.checkpoints import TINY
from tests.support.models_harness import CPU, PagedRunner, load
from tests.support.reference import reference_logits, save_checkpoint

CONFIG = LlamaConfig(**TINY, num_key_value_heads=2)
PROMPT = [3, 90, 17, 4, 55, 8, 8, 61]
MODEL_FILE = "model.safetensors"


@pytest.fixture
def folder(tmp_path):
    save_checkpoint(tmp_path, CONFIG)
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    save_checkpoint(tmp_path, CONFIG, max_shard_size="30KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    return tmp_path


def edit(folder, change):
    """Rewrite model.safetensors with `change` applied to its dict of tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def open_weights(folder, **options):
    return Weights.from_folder(folder, device=CPU, dtype=torch.float32, **options)


def test_sharded_checkpoint_gives_the_same_logits(sharded):
    runner = PagedRunner(load(sharded), ModelConfig.from_folder(sharded))
    logits = runner.step([(runner.add_row(), PROMPT)])[0]
    torch.testing.assert_close(logits, reference_logits(sharded, PROMPT), atol=1e-4, rtol=0)


def test_weights_are_cast_to_the_asked_dtype(folder):
    w = Weights.from_folder(folder, device=CPU, dtype=torch.bfloat16)
    stored = load_file(folder / "model.safetensors")["model.norm.weight"]
    assert torch.equal((w / "model" / "norm").tensor("weight", (32,)), stored.bfloat16())


@pytest.mark.parametrize("dim", [0, 1])
def test_shards_put_together_are_the_tensor(folder, dim):
    w = open_weights(folder) / "model.layers.1" / "self_attn" / "o_proj"
    shards = [w.shard("weight", (32, 32), dim=dim, rank=rank, size=4) for rank in range(4)]
    assert shards[0].shape[dim] == 8
    assert torch.equal(torch.cat(shards, dim), w.tensor("weight", (32, 32)))


def test_loaded_tensors_outlive_their_file(folder):
    weight = (open_weights(folder) / "model" / "norm").tensor("weight", (32,))
    before = weight.clone()
    path = folder / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(weight, before)


def test_progress_rises_to_the_total(folder):
    calls = []
    w = open_weights(folder, progress=lambda done, total: calls.append((done, total)))
    build(ModelConfig.from_folder(folder), w, TensorParallel())
    total = (folder / "model.safetensors").stat().st_size
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-2][0] > 0.9 * total
    assert calls[-1] == (total, total)
    assert {total for _, total in calls} == {total}


def test_unread_tensor_is_an_error_that_names_it(folder):
    edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}))
    with pytest.raises(ModelError, match=r"1 tensors have no place in the model: model\.layers\.0\.self_attn\.q_norm"):
        load(folder)


def test_rotary_buffers_of_old_checkpoints_are_no_error(folder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(folder, lambda tensors: tensors.update({name: torch.ones(4)}))
    load(folder)


def test_lm_head_beside_tied_embeddings_is_no_error_but_without_them_it_must_exist(tmp_path):
    save_checkpoint(tmp_path, LlamaConfig(**TINY, tie_word_embeddings=True))
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.ones(97, 32)}))
    load(tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))
    with pytest.raises(ModelError, match=r"tensor lm_head\.weight with shape \[97, 32\] is missing"):
        load(tmp_path)


def test_a_head_that_differs_from_tied_embeddings_is_used_as_in_transformers(tmp_path, caplog):
    save_checkpoint(tmp_path, LlamaConfig(**TINY, tie_word_embeddings=True))
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].flip(0)}))
    runner = PagedRunner(load(tmp_path), ModelConfig.from_folder(tmp_path))
    logits = runner.step([(runner.add_row(), [3, 1, 4])])[0]
    torch.testing.assert_close(logits, reference_logits(tmp_path, [3, 1, 4]), atol=1e-4, rtol=0)
    assert "lm_head.weight differs from the embedding and is used" in caplog.text


def test_missing_tensor_is_named_with_the_shape_it_should_have(folder):
    edit(folder, lambda tensors: tensors.pop("model.layers.2.mlp.down_proj.weight"))
    with pytest.raises(ModelError, match=r"model\.layers\.2\.mlp\.down_proj\.weight with shape \[32, 48\] is missing"):
        load(folder)


def test_wrong_shape_names_tensor_file_and_both_shapes(folder):
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))
    message = r"model\.safetensors: tensor model\.norm\.weight has shape \[31\], but config\.json requires \[32\]"
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_integer_weights_are_refused(folder):
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is int8, but config.json requires a float"):
        load(folder)


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty"])
def test_corrupt_file_is_named(folder, damage):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes({"truncated": content[: len(content) // 2], "garbage": b"\xff" * 1000, "empty": b""}[damage])
    with pytest.raises(ModelError, match=r"model\.safetensors: not a readable safetensors file"):
        load(folder)


def test_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        load(folder)


def test_shard_named_by_the_index_must_exist(sharded):
    max(sharded.glob("model-*.safetensors")).unlink()
    with pytest.raises(ModelError, match=r"index\.json: names model-[\d-]+of-\d+\.safetensors, which is not in"):
        load(sharded)


def test_tensor_must_be_in_the_shard_that_the_index_names(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra.weight"] = min(index["weight_map"].values())
    path.write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"tensor model\.extra\.weight is missing, although model\.safetensors\.index"):
        load(sharded)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_malformed_index_is_refused(sharded, content):
    (sharded / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match="malformed index"):
        load(sharded)


def test_dummy_weights_are_the_same_for_a_seed_and_differ_by_name_and_seed():
    def draw(name, seed):
        w = Weights.dummy(device=CPU, dtype=torch.float32, seed=seed)
        return (w / "model" / name).tensor("weight", (40, 30))

    assert torch.equal(draw("a", 1), draw("a", 1))
    assert not torch.equal(draw("a", 1), draw("b", 1))
    assert not torch.equal(draw("a", 1), draw("a", 2))
    assert draw("a", 1).std() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(draw("input_layernorm", 1), torch.ones(40, 30))


@pytest.mark.parametrize("dim", [0, 1])
def test_dummy_shards_are_slices_of_one_tensor(dim):
    w = Weights.dummy(device=CPU, dtype=torch.bfloat16)
    shards = [w.shard("weight", (8, 12), dim=dim, rank=rank, size=2) for rank in range(2)]
    assert torch.equal(torch.cat(shards, dim), w.tensor("weight", (8, 12)))


def test_model_of_dummy_weights_runs(folder):
    config = ModelConfig.from_folder(folder)
    runner = PagedRunner(build(config, Weights.dummy(device=CPU, dtype=torch.float32), TensorParallel()), config)
    logits = runner.step([(runner.add_row(), PROMPT)])[0]
    assert logits.shape == (len(PROMPT), 97)
    assert logits.isfinite().all()


def test_a_merged_projection_is_read_as_its_parts(tmp_path):
    merged = torch.arange(16 * 6.0).view(16, 6)
    save_file({"attn.qkv_proj.weight": merged, "attn.qkv_proj.bias": merged[:, 0].clone()}, tmp_path / MODEL_FILE)
    w = (open_weights(tmp_path) / "attn").split("qkv_proj", {"q_proj": 8, "k_proj": 4, "v_proj": 4})
    parts = {"q_proj": merged[:8], "k_proj": merged[8:12], "v_proj": merged[12:]}
    for name, expected in parts.items():
        assert torch.equal((w / name).tensor("weight", tuple(expected.shape)), expected)
        assert torch.equal((w / name).tensor("bias", (len(expected),)), expected[:, 0])
        shards = [(w / name).shard("weight", tuple(expected.shape), dim=0, rank=rank, size=2) for rank in range(2)]
        assert torch.equal(torch.cat(shards), expected)
    w.finish(has_tied_embeddings=False)


def test_a_merged_projection_of_another_size_is_named_as_the_checkpoint_names_it(tmp_path):
    save_file({"attn.qkv_proj.weight": torch.zeros(12, 6)}, tmp_path / MODEL_FILE)
    w = (open_weights(tmp_path) / "attn").split("qkv_proj", {"q_proj": 8, "k_proj": 4, "v_proj": 4})
    with pytest.raises(
        ModelError, match=r"attn\.qkv_proj\.weight has shape \[12, 6\], but config.json requires \[16, 6\]"
    ):
        (w / "k_proj").tensor("weight", (4, 6))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_random_integers_have_every_value_of_their_dtype(dtype: torch.dtype) -> None:
    """Without byte 255, twice the code of -6, random MXFP4 has a mean, and tokens choose the same experts."""
    w = Weights.dummy(device=torch.device("cpu"), dtype=torch.bfloat16)
    found = w.stored("blocks", (1 << 16,), (dtype,)).view(torch.uint8)
    counts = torch.bincount(found.int(), minlength=256)
    assert counts.min() > 0.7 * counts.float().mean()
