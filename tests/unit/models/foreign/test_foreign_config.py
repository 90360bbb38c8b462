"""Which classes of transformers are refused, and how their sizes are read."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.granite_swa import modeling_granite_swa

from models.errors import ModelError
from models.foreign.choose import read_config
from models.foreign.interface import MaskRule

SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": 97}


def write(folder: Path, config: transformers.PreTrainedConfig, name: str, **fields: object) -> Path:
    config.architectures = [name]
    config.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **fields}))
    return folder


def test_the_class_itself_tells_its_sizes(tmp_path: Path) -> None:
    config = transformers.DiffLlamaConfig(**SIZES, num_key_value_heads=2, intermediate_size=64)
    model = read_config(write(tmp_path, config, "DiffLlamaForCausalLM"))
    assert (model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim) == (4, 6, 2, 8)
    assert model.is_foreign
    assert model.num_parameters == transformers.DiffLlamaForCausalLM(config).num_parameters()


def test_windows_are_those_that_the_attentions_are_told(tmp_path: Path) -> None:
    config = transformers.Starcoder2Config(**SIZES, num_key_value_heads=2, sliding_window=20)
    assert read_config(write(tmp_path, config, "Starcoder2ForCausalLM")).sliding_windows == (20, 20)


@pytest.mark.parametrize(
    "name",
    [
        "LlavaNextForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Gemma3nForConditionalGeneration",
        "MllamaForConditionalGeneration",
        "PaliGemmaForConditionalGeneration",
        "Glm4vForConditionalGeneration",
        "SmolVLMForConditionalGeneration",
    ],
)
def test_a_model_of_several_parts_is_refused_as_one(tmp_path: Path, name: str) -> None:
    config = getattr(transformers, name).config_class()
    with pytest.raises(
        ModelError, match=r"a model of several parts \((text|vision), (text|vision).*models\.md"
    ) as caught:
        read_config(write(tmp_path, config, name))
    assert name in str(caught.value)


def test_a_model_whose_text_quire_serves_is_referred_to_its_own_layers(tmp_path: Path) -> None:
    config = transformers.Gemma3Config()
    folder = write(tmp_path, config, "Gemma3ForConditionalGeneration")
    with pytest.raises(ModelError, match=r"several parts .*Quire's own layers do: leave --model-impl transformers out"):
        read_config(folder, "transformers")


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_of_no_token_is_refused_with_its_field(tmp_path: Path, window: int) -> None:
    config = transformers.Starcoder2Config(**SIZES, num_key_value_heads=2)
    folder = write(tmp_path, config, "Starcoder2ForCausalLM", sliding_window=window)
    with pytest.raises(ModelError, match=f"sliding_window must be a positive integer, found {window}"):
        read_config(folder)


@pytest.mark.parametrize(
    ("config", "name", "words"),
    [
        (lambda: transformers.MambaConfig(**SIZES), "MambaForCausalLM", "layers that keep a state"),
        (lambda: transformers.BertConfig(**SIZES, intermediate_size=64), "BertLMHeadModel", "sees later tokens"),
        (lambda: transformers.DogeConfig(**SIZES), "DogeForCausalLM", "a mask of the class's own"),
        (
            lambda: transformers.Gemma3nTextConfig(**SIZES),
            "Gemma3nForCausalLM",
            "num_kv_shared_layers: layers that read the keys and values of another layer",
        ),
        (lambda: transformers.BloomConfig(**SIZES), "BloomForCausalLM", "does not let its attention be replaced"),
        (transformers.T5Config, "T5ForConditionalGeneration", "T5ForConditionalGeneration"),
        (transformers.GPT2Config, "SomebodysOwnModel", "has no class 'SomebodysOwnModel' of its own either"),
        (transformers.GPT2Config, "PreTrainedModel", "PreTrainedModel"),
        (transformers.GPT2Config, "OPTForCausalLM", "model_type 'gpt2' is not that of OPTForCausalLM"),
    ],
)
def test_what_cannot_be_right_is_refused_with_its_reason(tmp_path: Path, config, name: str, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        read_config(write(tmp_path, config(), name))
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda heads: torch.zeros(heads + 2), r"s_aux of shape \[8\]"),
        (lambda heads: torch.zeros(1, heads, 1, 1), r"s_aux of shape \[1, 6, 1, 1\]"),
        (lambda heads: torch.zeros(heads, 3), r"s_aux of shape \[6, 3\]"),
        (lambda heads: [0.0] * heads, "s_aux of type list"),
    ],
)
def test_sinks_that_are_not_one_number_for_each_head_are_refused(tmp_path: Path, monkeypatch, make, found: str) -> None:
    attention = modeling_granite_swa.GraniteSWAAttention
    forward = attention.forward

    def with_other_sinks(module, *args, **kwargs):
        module._parameters.pop("sinks")
        module.sinks = make(6)
        return forward(module, *args, **kwargs)

    monkeypatch.setattr(attention, "forward", with_other_sinks)
    config = transformers.GraniteSWAConfig(**SIZES, num_key_value_heads=2, intermediate_size=64, sliding_window=20)
    with pytest.raises(ModelError, match=f"GraniteSWAForCausalLM: .*{found}, not one number for each of its 6 heads"):
        read_config(write(tmp_path, config, "GraniteSWAForCausalLM"))


def test_a_class_that_fails_is_named_with_what_it_raises(tmp_path: Path, monkeypatch) -> None:
    def forward(self, input_ids=None, **options):
        return self.model(input_ids, **options).of_another_class

    whole = transformers.Starcoder2ForCausalLM.forward
    config = transformers.Starcoder2Config(**SIZES, num_key_value_heads=2)
    write(tmp_path, config, "Starcoder2ForCausalLM")
    calls: list[None] = []

    def only_later(self, *args, **options):  # whole in the examination of its attention, its head alone not
        calls.append(None)
        return (whole if len(calls) == 1 else forward)(self, *args, **options)

    monkeypatch.setattr(transformers.Starcoder2ForCausalLM, "forward", only_later)
    with pytest.raises(ModelError, match=r"Starcoder2ForCausalLM: .* fails .*: AttributeError: .*of_another_class"):
        read_config(tmp_path)


@pytest.mark.parametrize("read", [lambda ids: ids.max().item(), lambda ids: ids.cpu()])
def test_a_class_that_reads_values_of_its_tensors_is_refused_in_plain_words(tmp_path: Path, monkeypatch, read) -> None:
    forward = transformers.Starcoder2ForCausalLM.forward

    def reading(self, input_ids=None, **options):
        assert read(input_ids) is not None
        return forward(self, input_ids, **options)

    monkeypatch.setattr(transformers.Starcoder2ForCausalLM, "forward", reading)
    config = transformers.Starcoder2Config(**SIZES, num_key_value_heads=2)
    with pytest.raises(ModelError, match="reads the values of tensors, which Quire cannot examine"):
        read_config(write(tmp_path, config, "Starcoder2ForCausalLM"))


def test_layers_that_do_not_hand_on_the_arguments_of_the_model_are_refused_in_plain_words(tmp_path: Path) -> None:
    config = transformers.NemotronConfig(**SIZES, num_key_value_heads=2, intermediate_size=64)
    words = "NemotronAttention: transformers' own class does not let its attention be replaced"
    with pytest.raises(ModelError, match=words):
        read_config(write(tmp_path, config, "NemotronForCausalLM"))


def test_rope_by_the_longest_text_of_a_batch_is_refused(tmp_path: Path) -> None:
    config = transformers.OlmoConfig(**SIZES)
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ModelError, match="rope_type 'dynamic'"):
        read_config(write(tmp_path, config, "OlmoForCausalLM"))


def test_a_quantised_checkpoint_is_refused(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=48, n_head=6, n_layer=2)
    write(tmp_path, config, "GPT2LMHeadModel", quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(ModelError, match="quantization_config"):
        read_config(tmp_path)


def test_code_of_a_checkpoint_never_runs(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=48, n_head=6, n_layer=2)
    write(tmp_path, config, "OwnGPT", auto_map={"AutoModelForCausalLM": "own.OwnGPT"})
    (tmp_path / "own.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(ModelError, match="has no class 'OwnGPT'"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("allows", "window", "wanted"),
    [
        (lambda query, key: key <= query, None, True),
        (lambda query, key: key < query, None, False),
        (lambda query, key: torch.ones_like(key <= query), None, False),
        (lambda query, key: (key <= query) & (key > query - 20), 20, True),
        (lambda query, key: (key <= query) & (key > query - 20), None, False),
        (lambda query, key: (key <= query) & (key > query - 21), 20, False),
        (lambda query, key: (key <= query) & (key // 1024 == query // 1024), None, False),
        (lambda query, key: (key <= query) & (query < 3000), None, False),
        (lambda query, key: (key <= query) | (key < 4), None, False),
    ],
)
def test_a_mask_is_asked_where_rules_differ(allows, window: int | None, wanted: bool) -> None:
    rule = MaskRule(lambda batch, head, query, key: allows(query, key))
    assert rule.is_causal_window(window, longest=4096) is wanted
