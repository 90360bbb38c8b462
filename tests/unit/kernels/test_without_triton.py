"""A plain installation with torch for the CPU has no Triton: every op then runs as its torch specification."""

import json
import subprocess
import sys

import pytest

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
# None: every import of it, or of what is below it, raises ModuleNotFoundError
HIDE_AND_RUN = """
import sys
sys.modules["triton"] = None
from tests.unit.kernels import without_triton
without_triton.main()
"""


@pytest.mark.slow
def test_every_op_and_a_quantised_model_run_on_the_cpu_without_triton(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    run = subprocess.run(
        [sys.executable, "-c", HIDE_AND_RUN, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert (run.stdout.strip(), run.returncode) == ("", 0), run.stdout + run.stderr
