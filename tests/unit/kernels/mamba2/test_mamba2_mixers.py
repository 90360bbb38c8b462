"""The ops of a Mamba-2 layer, one after another in several steps, against the mixers of transformers' families."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.causal_conv.reference import causal_conv
from kernels.ops import grouped_gated_norm, mamba2, mamba2_dt
from kernels.states import StateMetadata, StateView

HEADS, HEAD_DIM, GROUPS, STATE, HIDDEN = 4, 12, 2, 16, 24
WIDTH = HEADS * HEAD_DIM
SIZES = {"mamba_n_heads": HEADS, "mamba_d_head": HEAD_DIM, "mamba_n_groups": GROUPS, "mamba_d_state": STATE,
         "mamba_chunk_size": 16, "mamba_expand": 2, "hidden_size": HIDDEN, "time_step_limit": (0.0, 1.5)}  # fmt: skip


def nemotron():
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHConfig, NemotronHMamba2Mixer

    config = NemotronHConfig(
        hidden_size=HIDDEN, mamba_num_heads=HEADS, mamba_head_dim=HEAD_DIM, n_groups=GROUPS, ssm_state_size=STATE,
        chunk_size=16, time_step_min=0.3,
    )  # fmt: skip
    return NemotronHMamba2Mixer(config, layer_idx=0)


def bamba():
    from transformers.models.bamba.modeling_bamba import BambaConfig, BambaMixer

    return BambaMixer(BambaConfig(**SIZES, num_hidden_layers=1, attn_layer_indices=[]), layer_idx=0)


def granite():
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
        GraniteMoeHybridConfig,
        GraniteMoeHybridMambaLayer,
    )

    config = GraniteMoeHybridConfig(**SIZES, num_hidden_layers=1, layer_types=["mamba"])
    return GraniteMoeHybridMambaLayer(config, layer_idx=0)


def falcon(**fields):
    from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Config, FalconH1Mixer

    mixer = FalconH1Mixer(FalconH1Config(**SIZES, mamba_d_ssm=WIDTH, num_hidden_layers=1, **fields), layer_idx=0)
    mixer.mup_vector = 1.0  # set by the model: its multipliers are no part of the ops
    return mixer


FAMILIES = {
    "nemotron": (nemotron, {}),
    "bamba": (bamba, {}),
    "granite": (granite, {}),
    "falcon": (lambda: falcon(mamba_rms_norm=False), {}),
    "falcon, norm first": (
        lambda: falcon(mamba_rms_norm=True, mamba_norm_before_gate=True), {"has_norm_first": True}
    ),
    "falcon, gate first": (lambda: falcon(mamba_rms_norm=True, mamba_norm_before_gate=False), {}),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A mixer's weights behind the house's ops."""

    mixer: torch.nn.Module
    norm_options: dict[str, bool]
    conv_view: StateView
    view: StateView

    def __call__(self, hidden_states: torch.Tensor, metadata: StateMetadata) -> torch.Tensor:
        mixer, channels = self.mixer, WIDTH + 2 * GROUPS * STATE
        z, xbc, raw_dt = mixer.in_proj(hidden_states).split([WIDTH, channels, HEADS], dim=-1)
        weight, bias = mixer.conv1d.weight[:, 0], mixer.conv1d.bias
        xbc = causal_conv(xbc, weight, bias, self.conv_view, metadata, has_silu=True)
        x, b, c = xbc.split([WIDTH, GROUPS * STATE, GROUPS * STATE], dim=-1)
        y = mamba2(
            x.unflatten(1, (HEADS, HEAD_DIM)), b.unflatten(1, (GROUPS, STATE)), c.unflatten(1, (GROUPS, STATE)),
            mamba2_dt(raw_dt, mixer.dt_bias, mixer.time_step_limit), -mixer.A_log.exp(), mixer.D, self.view, metadata,
        ).flatten(1)  # fmt: skip
        norm = mixer.norm
        gated = grouped_gated_norm(
            y, z, getattr(norm, "weight", None), getattr(norm, "variance_epsilon", 0.0), group_size=WIDTH // GROUPS,
            **self.norm_options,
        )  # fmt: skip
        return mixer.out_proj(gated)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_in_several_rows_equals_the_mixer_of(name):
    torch.manual_seed(0)
    make, norm_options = FAMILIES[name]
    mixer = make().eval()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    hidden_states = torch.randn(1, 50, HIDDEN)
    pool = torch.full((2, 9, 7 * STATE), torch.nan)
    channels = WIDTH + 2 * GROUPS * STATE
    conv_view = StateView(pool, first_piece=0, num_rows=channels, row_size=3)
    view = StateView(pool, first_piece=conv_view.num_pieces, num_rows=WIDTH, row_size=STATE)
    assert view.first_piece + view.num_pieces <= 2 * 8
    layer, outs = _Layer(mixer, norm_options, conv_view, view), []
    with torch.inference_mode():
        expected = mixer(hidden_states)[0]
        for first, end in ((0, 33), (33, 34), (34, 49), (49, 50)):
            metadata = StateMetadata(
                query_start_loc=torch.tensor([0, end - first], dtype=torch.int32),
                seq_lens=torch.tensor([end], dtype=torch.int32),
                req_index=torch.tensor([0]),
                pages=torch.tensor([[3, 1, 7, 5, 2, 8, 4, 6]], dtype=torch.int32),
                writes=None,
                max_query_len=end - first,
                num_decodes=None,
            )
            outs.append(layer(hidden_states[0, first:end], metadata))
    torch.testing.assert_close(torch.cat(outs), expected, rtol=1e-4, atol=1e-4)
