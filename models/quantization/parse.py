"""From a config.json's quantization_config, or the flag --quantization, to a QuantizationConfig.

A new format of checkpoints is one file and one row of FORMATS; a new way to quantise on load is one row of ON_LOAD.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from models.errors import ModelError
from models.fields import Fields
from models.quantization import awq, bitsandbytes, compressed_tensors, fp8, gptq
from models.quantization.config import QuantizationConfig, Scheme

# quant_method → its parser, which is given the quantization_config
FORMATS: dict[str, Callable[[Fields], QuantizationConfig]] = {
    "fp8": fp8.parse,
    "bitsandbytes": bitsandbytes.parse,
    "compressed-tensors": compressed_tensors.parse,
    "awq": awq.parse,
    "gptq": gptq.parse,
}
# --quantization → what layers of an unquantized checkpoint become while they are read (server/config/value_types.py has
# the names)
ON_LOAD: dict[str, Scheme] = {
    "fp8": fp8.ON_LOAD,
    "bitsandbytes-nf4": bitsandbytes.NF4_ON_LOAD,
    "bitsandbytes-int8": bitsandbytes.INT8_ON_LOAD,
}


def parse_quantization(config: Fields) -> QuantizationConfig | None:
    """Read quantization_config; None: there is none. Raises ModelError."""
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
    """Bring a checkpoint and the flag together. wanted: "auto" (as the checkpoint is), "none", or a scheme.

    Raises ModelError if the checkpoint is quantised, and otherwise than wanted.
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
        raise ModelError(f"--quantization {wanted}: the checkpoint is not, and on load layers become only {names}")
    return QuantizationConfig.of_all(wanted, ON_LOAD[wanted], is_on_load=True)
