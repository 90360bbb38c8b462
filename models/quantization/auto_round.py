"""Parser of quant_method auto-round (Cheng et al. 2023, arXiv:2309.05516): integers in the packings of GPTQ and of AWQ.

`packing_format` says which; g_idx is left out, since inputs are in order. `block_name_to_quantize` has the names with
which those of quantised layers begin, `extra_config` the exceptions, by a layer's name or a regular expression found in
it: other bits and groups, or 16 bits for a layer that is not quantised. A name decides before an expression.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping

from models.errors import ModelError
from models.fields import Fields
from models.quantization.awq import Awq
from models.quantization.config import LayerNames, QuantizationConfig, Rule
from models.quantization.gptq import Gptq
from models.quantization.integers import read_bits, read_group_size

_GPTQ, _AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"
_SIGNS = frozenset("*+?[](){}|^$\\")  # of an expression; names have none
_WIDTHS = {_GPTQ: (4, 8), _AWQ: (4,)}
_DENSE_BITS = 16
# Of GPTQ and AWQ: AutoRound reads them too, but writes others
_OF_OTHERS = ("modules_to_not_convert", "modules_in_block_to_quantize", "dynamic", "quant_block_list")
_HEAD = "lm_head"


def parse(fields: Fields) -> QuantizationConfig:
    """Read a quantization_config of quant_method auto-round."""
    packing = fields.get("packing_format") or (_GPTQ if fields.get("backend") in (None, "auto") else None)
    if not isinstance(packing, str) or packing not in _WIDTHS:
        raise ModelError(
            f"{fields.where}: packing_format {fields.get('packing_format')!r} is not supported: supported are "
            f"{', '.join(map(repr, _WIDTHS))}"
        )
    for name in _OF_OTHERS:
        if fields.get(name):
            raise ModelError(f"{fields.where}: {name} is not supported with auto-round: exceptions are extra_config's")
    scheme = _read_scheme(fields, packing)
    if scheme is None:
        raise ModelError(f"{fields.where}: bits {fields.get('bits')!r} is not supported for all layers")
    extra = fields.get("extra_config") or {}
    where = f"{fields.where}: extra_config"
    if not isinstance(extra, Mapping) or not all(isinstance(own, Mapping) for own in extra.values()):
        raise ModelError(f"{where} must be an object of objects, found {extra!r}")
    schemes = {name: _read_scheme(Fields(own, f"{where} {name}"), packing, base=scheme) for name, own in extra.items()}
    expressions = {name for name in schemes if _SIGNS & {*name}}
    named = sorted(schemes, key=lambda name: name in expressions)  # else in the file's order
    if fields.flag(_HEAD) or schemes.get(_HEAD) is not None:
        raise ModelError(f"{fields.where}: {_HEAD} is quantized: the output matrix must be unquantized")
    patterns = {name: f"re:.*(?:{name})" if name in expressions else name for name in named}
    ignored = LayerNames.parse([patterns[name] for name in named if schemes[name] is None], where=where)
    quantized = [name for name in named if schemes[name] is not None]
    for name in quantized:
        if name not in expressions and (found := ignored.entry_of(name)) is not None:
            raise ModelError(f"{where}: {name} is quantized, but {found.removeprefix('re:.*')!r} says that it is not")
    rules = [
        Rule(LayerNames.parse([patterns[name] for name in run], where=where), own)
        for own, run in itertools.groupby(quantized, key=schemes.__getitem__)
        if own is not None
    ]
    return QuantizationConfig("auto-round", (*rules, Rule(_read_blocks(fields), scheme)), ignored)


def _read_scheme(fields: Fields, packing: str, base: Gptq | Awq | None = None) -> Gptq | Awq | None:
    """Read the settings of all layers, or with `base` of some, which have the others from it; None: 16 bits."""
    bits = fields.get("bits")
    if isinstance(bits, int) and bits >= _DENSE_BITS:
        return None
    for name, supported in (("data_type", (None, "int")), ("act_bits", (None, _DENSE_BITS, 2 * _DENSE_BITS))):
        if fields.get(name) not in supported:
            raise ModelError(
                f"{fields.where}: {name} {fields.get(name)!r} is not supported: supported is {supported[1]!r}"
            )
    if base is None or bits is not None:
        bits = read_bits(fields, supported=_WIDTHS[packing])
    group_size = read_group_size(fields) if base is None or fields.get("group_size") is not None else base.group_size
    if packing == _AWQ:
        return Awq(group_size)
    is_symmetric = fields.flag("sym", default=True if base is None else base.is_symmetric)
    if base is None:
        return Gptq(bits, group_size, has_order=False, is_v2=False, is_symmetric=is_symmetric)
    assert isinstance(base, Gptq)
    return dataclasses.replace(base, bits=bits or base.bits, group_size=group_size, is_symmetric=is_symmetric)


def _read_blocks(fields: Fields) -> LayerNames:
    """Read the beginnings of quantised layers' names: a list, or a text with commas between; none: every layer."""
    for name in ("block_name_to_quantize", "to_quant_block_names"):
        blocks = fields.get(name)
        if blocks is None:
            continue
        if isinstance(blocks, str):
            blocks = [block.strip() for block in blocks.split(",")]
        elif isinstance(blocks, list) and all(isinstance(block, list) for block in blocks):
            blocks = [block for group in blocks for block in group]
        found = LayerNames.parse(blocks, where=f"{fields.where}: {name}")
        if found.patterns:
            return LayerNames(tuple(f"re:{re.escape(block)}" for block in found.patterns))
    return LayerNames(has_all=True)
