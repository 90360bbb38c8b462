"""Latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, §2.1) and its fields of a config.json.

Keys and values of all heads are products with one latent vector of each token. The cache keeps the latent and one
rotated part of a key, which all heads share: [rank + rope_dim] for each token and layer, whatever the number of heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from models.architecture import Architecture
from models.config.layer_cache import LayerCache
from models.config.matrix import Matrix
from models.errors import ModelError
from models.fields import Fields

EPS = 1e-6  # of the norms of the latents, whatever rms_norm_eps says (transformers, DeepseekV3Attention)


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of latent attention, the same in all layers."""

    rank: int  # of the latent of keys and values
    q_rank: int | None  # of the latent of queries; None: they are one product
    nope_dim: int  # of each head: the part of queries and keys that is not rotated
    rope_dim: int  # the part that is, where a layer has positions; of keys one for all heads
    v_head_dim: int
    is_interleaved: bool  # RoPE rotates neighbouring dimensions
    has_bias: bool  # of the projections to latents and of the output

    @property
    def head_dim(self) -> int:
        """The numbers of a head's query, as the checkpoint has it."""
        return self.nope_dim + self.rope_dim

    @property
    def layer_cache(self) -> LayerCache:
        """What a layer keeps: the latent, which is all heads' value, and behind it the rotated part of the key."""
        return LayerCache(1, self.rank + self.rope_dim, self.rank, values_in_keys=True)

    def matrices(self, block: str, *, hidden_size: int, num_heads: int) -> Iterator[Matrix]:
        """Yield a layer's projections. block: their place. Every rank has those to latents whole."""
        if self.q_rank is None:
            yield Matrix(f"{block}.q_proj", num_heads * self.head_dim, hidden_size, "outputs")
        else:
            yield Matrix(f"{block}.q_a_proj", self.q_rank, hidden_size, "outputs", num_kv_heads=1)
            yield Matrix(f"{block}.q_b_proj", num_heads * self.head_dim, self.q_rank, "outputs")
        width = self.rank + self.rope_dim
        yield Matrix(f"{block}.kv_a_proj_with_mqa", width, hidden_size, "outputs", num_kv_heads=1)
        num_outputs = num_heads * (self.nope_dim + self.v_head_dim)
        yield Matrix(f"{block}.kv_b_proj", num_outputs, self.rank, "outputs", is_expanded=True)
        yield Matrix(f"{block}.o_proj", hidden_size, num_heads * self.v_head_dim, "inputs")

    def count_parameters(self, *, hidden_size: int, num_heads: int) -> int:
        """Count the parameters of a layer's attention."""
        matrices = self.matrices("", hidden_size=hidden_size, num_heads=num_heads)
        count = sum(matrix.out_features * matrix.in_features for matrix in matrices)
        q_rank = self.q_rank or 0
        return count + q_rank + self.rank + self.has_bias * (q_rank + self.rank + self.rope_dim + hidden_size)


def parse_latent(config: Fields, architecture: Architecture) -> LatentConfig | None:
    """Read the fields; None: the architecture has no latent attention. Raises ModelError."""
    if architecture.latent == "none":
        return None
    # The first two are computed from others (transformers, DeepseekV3Config), and each query head has a key of its own
    config.pass_over("head_dim", "qk_head_dim", "num_key_value_heads")
    rope_dim = config.count("qk_rope_head_dim")
    if rope_dim % 2 != 0:
        raise ModelError(f"{config.where}: qk_rope_head_dim {rope_dim} is odd, but RoPE rotates pairs")
    if architecture.latent == "unrotated":
        config.pass_over("rope_interleave")
    return LatentConfig(
        rank=config.count("kv_lora_rank"),
        q_rank=None if config.get("q_lora_rank") is None else config.count("q_lora_rank"),
        nope_dim=config.count("qk_nope_head_dim"),
        rope_dim=rope_dim,
        v_head_dim=config.count("v_head_dim"),
        is_interleaved=architecture.latent == "interleaved"
        or (architecture.latent == "interleaved_if_said" and config.flag("rope_interleave")),
        has_bias=config.flag("attention_bias"),
    )
