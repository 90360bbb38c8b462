"""find_sparse_layers: the layers of a config.json that have a mixture of experts; each family has a rule of its own."""

from __future__ import annotations

from models.architecture import Architecture
from models.config.mamba2 import read_block_kinds
from models.errors import ModelError
from models.fields import Fields


def find_sparse_layers(config: Fields, architecture: Architecture, num_layers: int) -> tuple[bool, ...]:
    """Return True for each layer with experts."""
    kind = architecture.experts
    if kind in ("qwen2", "qwen3"):
        return _stepped_layers(config, num_layers)
    if kind == "ernie4_5":
        step, first = config.count("moe_layer_interval", default=1), _index(config, "moe_layer_start_index")
        last = _index(config, "moe_layer_end_index")
        last = num_layers - 1 if last == -1 else last
        return tuple((layer + 1) % step == 0 and first <= layer <= last for layer in range(num_layers))
    if kind in ("exaone", "cohere2"):
        return read_sparse_kinds(config, num_layers)
    kinds = config.get("mlp_layer_types") if kind in ("mellum", "glm_lite", "kimi") else None
    if kind in ("glm", "deepseek2", "kimi", "mistral4") and kinds is None:
        return tuple(layer >= _index(config, "first_k_dense_replace") for layer in range(num_layers))
    if kind == "lfm2":
        num_dense = 0 if config.get("num_dense_layers") == 0 else config.count("num_dense_layers", default=2)
        return tuple(layer >= num_dense for layer in range(num_layers))
    if kind == "nemotron":
        return tuple(each == "moe" for each in read_block_kinds(config, architecture))
    if kind == "llama4":
        return _listed_layers(config, num_layers)
    if kind == "kimi":
        config.pass_over("first_k_dense_replace")
    if kinds is None:
        return tuple(kind != "glm_lite" or layer > 0 for layer in range(num_layers))
    return _read_kinds(config, kinds, num_layers)


def read_sparse_kinds(config: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return True for each layer with experts: by its kind, by is_moe_layer, or all but the first few.

    The last two are the spellings of published files of EXAONE-MoE and Command A+. Raises ModelError.
    """
    kinds, listed = config.get("mlp_layer_types"), config.get("is_moe_layer")
    config.pass_over("first_k_dense_replace")
    if kinds is not None:
        return _read_kinds(config, kinds, num_layers)
    if listed is not None:
        if not _is_list(listed, num_layers, (False, True)):
            raise ModelError(
                f"{config.where}: is_moe_layer must be a list of true and false for {num_layers} layers, found"
                f" {listed!r}"
            )
        return tuple(map(bool, listed))
    return tuple(layer >= num_dense_layers(config) for layer in range(num_layers))


def num_dense_layers(config: Fields) -> int:
    """Read the number of layers without experts, which are the first."""
    return 0 if config.get("first_k_dense_replace") in (0, None) else config.count("first_k_dense_replace")


def _read_kinds(config: Fields, kinds: object, num_layers: int) -> tuple[bool, ...]:
    """Read mlp_layer_types."""
    if not isinstance(kinds, list) or not _is_list(kinds, num_layers, ("dense", "sparse")):
        raise ModelError(
            f"{config.where}: mlp_layer_types must be a list of 'dense' and 'sparse' for {num_layers} layers, found"
            f" {kinds!r}"
        )
    return tuple(kind == "sparse" for kind in kinds)


def _listed_layers(config: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return True for each layer with experts, by the rule of transformers' Llama4TextConfig."""
    listed = config.get("moe_layers")
    config.pass_over("interleave_moe_layer_step")
    if listed is None:
        step = config.count("interleave_moe_layer_step", default=1)
        return tuple((layer + 1) % step == 0 for layer in range(num_layers))
    if not isinstance(listed, list) or not all(isinstance(i, int) and 0 <= i < num_layers for i in listed):
        raise ModelError(f"{config.where}: moe_layers must be indices of the {num_layers} layers, found {listed!r}")
    return tuple(layer in listed for layer in range(num_layers))


def _stepped_layers(config: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return True for each layer with experts, by the rule of transformers' Qwen2MoeDecoderLayer."""
    step = config.count("decoder_sparse_step", default=1)
    dense = config.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in dense):
        raise ModelError(f"{config.where}: mlp_only_layers must be a list of layer indices, found {dense!r}")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))


def _index(config: Fields, name: str) -> int:
    """Read the index of a layer; -1 is the last."""
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < -1:
        raise ModelError(f"{config.where}: {name} must be the index of a layer, found {value!r}")
    return value


def _is_list(value: object, length: int, values: tuple[object, ...]) -> bool:
    return isinstance(value, list) and len(value) == length and all(each in values for each in value)
