"""Chooses a model's QuantizationConfig, and routes each layer to the LinearMethod of its scheme.

parse_quantization reads a config.json's quantization_config; choose_quantization applies the flag --quantization;
PerLayer is the LinearMethod of a whole model. A new checkpoint format is one file and one row of FORMATS; a new format
for quantising on load is one row of ON_LOAD.

Unquantized: the LinearMethod of weights in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from kernels.linear.late_norm import GateKind, LateNorm
from kernels.linear.onednn import Bf16Matrix, can_pack, pack
from kernels.linear.ops import DenseLinear
from kernels.linear.rounding import RoundedRows, Rounding
from models.errors import ModelError
from models.fields import Fields
from models.quantization import auto_round, awq, bitsandbytes, compressed_tensors, float4, fp8, gptq, int8, mxfp4
from models.quantization.config import QuantizationConfig, Scheme, check_share, naming_scheme
from models.quantization.integers import Int4OnLoad
from models.quantization.linear_method import LinearMethod, LinearParams, LinearPart, TakesRoundedRows, rounding_of
from models.quantization.shards import StoredPart, read_dense
from models.weights.weights import Weights


class Unquantized:
    """LinearMethod: one dense [out, in] matrix."""

    def __init__(self) -> None:
        self._linear = DenseLinear()

    def load(self, w: Weights, parts: Sequence[LinearPart]) -> dict[str, torch.Tensor | Bf16Matrix]:
        """Read each `<name>.weight`; see LinearMethod.load."""
        shards = [read_dense(w, part) for part in parts]
        weight = shards[0] if len(shards) == 1 else torch.cat(shards)
        return {"weight": pack(weight) if can_pack(weight) else weight}

    def apply(
        self, params: dict[str, torch.Tensor | Bf16Matrix], x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See LinearMethod.apply."""
        return self._linear(x, params["weight"], bias)

    def gates(self, params: dict[str, torch.Tensor | Bf16Matrix], x: torch.Tensor) -> bool:
        """See TakesGate.gates."""
        return self._linear.gates(x, params["weight"])

    def apply_gated(self, params: dict[str, torch.Tensor], x: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
        """See TakesGate.apply_gated."""
        return self._linear.gated(x, params["weight"], is_gelu=is_gelu)

    def takes_norm(self, params: dict[str, torch.Tensor | Bf16Matrix], x: torch.Tensor) -> bool:
        """See TakesNorm.takes_norm."""
        return self._linear.takes_norm(x, params["weight"])

    def apply_normed(
        self,
        params: dict[str, torch.Tensor],
        late: LateNorm,
        bias: torch.Tensor | None,
        *,
        gate: GateKind = "",
        normed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See TakesNorm.apply_normed."""
        return self._linear.normed(late, params["weight"], bias, gate=gate, normed=normed)


@dataclass(frozen=True)
class RoutedParams:
    """One layer, cut along its outputs where its parts have different methods."""

    methods: tuple[LinearMethod, ...]
    params: tuple[LinearParams, ...]
    sizes: tuple[int, ...]  # outputs of each cut on this rank


class PerLayer:
    """LinearMethod that uses each layer's own scheme, found by the layer's name."""

    def __init__(self, config: QuantizationConfig) -> None:
        self._config = config
        self._methods: dict[Scheme | None, LinearMethod] = {None: Unquantized()}

    def load(self, w: Weights, parts: Sequence[LinearPart]) -> RoutedParams:
        """Load neighbouring parts with equal schemes as one matrix; see LinearMethod.load.

        From headers alone (Weights.headers) quantised parts are checked, and nothing is loaded.
        """
        groups: list[tuple[Scheme | None, str, list[LinearPart]]] = []
        for part in parts:
            name = w.projection(part.name, part.out_features).name
            scheme = self._config.scheme_of(name)
            if scheme is not None:
                whole = part.out_features if part.dim == 0 else part.in_features
                check_share(scheme, name, "outputs" if part.dim == 0 else "inputs", whole=whole, num_shares=part.size)
            if not groups or groups[-1][0] != scheme:
                groups.append((scheme, name, []))
            groups[-1][2].append(part)
        methods: list[LinearMethod] = []
        params: list[LinearParams] = []
        for scheme, name, group in groups:
            with naming_scheme(self._config, name, layer=w.full_name("").removesuffix(".")):
                methods.append(self._method_of(scheme))
                if w.headers is None or scheme is None:
                    params.append(methods[-1].load(w, group))
                    continue
                for part in group:
                    stored = StoredPart.locate(w, part)
                    w.headers.expect(stored.name, scheme.expected(stored))
        sizes = tuple(sum(part.outputs for part in group) for *_, group in groups)
        return RoutedParams(tuple(methods), tuple(params), sizes)

    def apply(self, params: RoutedParams, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See LinearMethod.apply."""
        if len(params.methods) == 1:
            return params.methods[0].apply(params.params[0], x, bias)
        biases: Sequence[Any] = (None,) * len(params.sizes) if bias is None else bias.split(params.sizes)
        outputs = map(lambda method, own, part: method.apply(own, x, part), params.methods, params.params, biases)
        return torch.cat(tuple(outputs), dim=-1)

    def rounding(self, params: RoutedParams) -> Rounding | None:
        """See TakesRoundedRows.rounding: the method's, if there is one for all parts, and they are loaded."""
        is_one = len(params.methods) == len(params.params) == 1
        return rounding_of(params.methods[0], params.params[0]) if is_one else None

    def apply_rounded(self, params: RoutedParams, x: RoundedRows, bias: torch.Tensor | None) -> torch.Tensor:
        """See TakesRoundedRows.apply_rounded."""
        return cast("TakesRoundedRows", params.methods[0]).apply_rounded(params.params[0], x, bias)

    def _method_of(self, scheme: Scheme | None) -> LinearMethod:
        if scheme is None or scheme in self._methods:
            return self._methods[scheme]
        self._methods[scheme] = scheme.make_method()
        return self._methods[scheme]


# quant_method → parser of its quantization_config
FORMATS: dict[str, Callable[[Fields], QuantizationConfig]] = {
    "fp8": fp8.parse,
    "bitsandbytes": bitsandbytes.parse,
    "compressed-tensors": compressed_tensors.parse,
    "awq": awq.parse,
    "gptq": gptq.parse,
    "auto-round": auto_round.parse,
    "mxfp4": mxfp4.parse,
    "modelopt": float4.parse_modelopt,
}
# --quantization → scheme that quantises an unquantized checkpoint's layers while they are read
# (server/config/value_types.py has the names)
ON_LOAD: dict[str, Scheme] = {
    "fp8": fp8.ON_LOAD,
    "w8a8": int8.ON_LOAD,
    "int4": Int4OnLoad(),
    "bitsandbytes-nf4": bitsandbytes.NF4_ON_LOAD,
    "bitsandbytes-int8": bitsandbytes.INT8_ON_LOAD,
}


# Those of ON_LOAD that round the LM head as well, to 8-bit integers
ROUND_HEADS = ("w8a8", "int4")


def parse_quantization(config: Fields) -> QuantizationConfig | None:
    """Read quantization_config, None if it is missing. Raises ModelError."""
    section = config.get("quantization_config")
    if section is None:
        return None
    if not isinstance(section, Mapping):
        raise ModelError(f"{config.where}: quantization_config must be an object, found {section!r}")
    method = section.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS:
        raise ModelError(
            f"{config.where}: quant_method {method!r} is not supported: supported are {', '.join(FORMATS)}"
        )
    return FORMATS[method](Fields(section, f"{config.where}: quantization_config"))


def choose_quantization(found: QuantizationConfig | None, wanted: str) -> QuantizationConfig | None:
    """Combine the checkpoint's scheme with the flag. wanted: "auto" (the checkpoint's), "none", or a scheme's name.

    Raises ModelError if the checkpoint is quantised with another scheme than wanted.
    """
    if wanted == "auto" or (found is not None and found.name == wanted):
        return found
    if found is not None:
        raise ModelError(
            f"--quantization {wanted}: the checkpoint is quantized as {found.name} already:"
            " leave the flag out, or serve the unquantized checkpoint"
        )
    if wanted == "none":
        return None
    if wanted not in ON_LOAD:
        names = ", ".join(ON_LOAD)
        raise ModelError(
            f"--quantization {wanted}: the checkpoint is not quantized, and quantization on load supports only {names}"
        )
    config = QuantizationConfig.of_all(wanted, ON_LOAD[wanted], is_on_load=True)
    return replace(config, rounds_head=wanted in ROUND_HEADS)
