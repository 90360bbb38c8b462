"""The benchmark of quantisation: every scheme of its table is one that a model has, and failures are told apart."""

import json

import pytest

from benchmarks.quantization import SCHEMES, format_report, measure_errors
from engine.config import EngineConfig
from server.resolve import DEMO_FOLDER


@pytest.mark.parametrize(("name", "candidate"), SCHEMES.items())
def test_every_scheme_errs_as_its_bits_let_expect(tmp_path, name, candidate):
    raw = json.loads((DEMO_FOLDER / "config.json").read_text()) | {"hidden_size": 256, "intermediate_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": candidate.section}))
    config = EngineConfig(model=str(tmp_path), device="cpu", quantization=candidate.flag)
    errors = measure_errors(config)
    assert sorted(errors) == ["mlp.down_proj", "mlp.gate_proj", "self_attn.o_proj", "self_attn.q_proj"]
    assert all(error == 0.0 if name == "bf16" else 0.001 < error < 0.25 for error in errors.values())


def test_a_scheme_that_failed_leaves_the_others_their_rows():
    result = {"weights_gib": 1.5, "errors": {"a": 0.01, "b": 0.02}, "decode_tok_per_s": {"1": 1234.5}}
    report = {"args": {"batches": [1]}, "schemes": {"fp8": result, "nf4": {"failed": "RuntimeError: no"}}}
    assert format_report(report).splitlines()[1:] == ["fp8       1.50  2.00%      1,234", "nf4     failed"]
