"""IntMatrix: experts as 4- or 8-bit integers with a scale, and possibly a zero point, by group of inputs.

AWQ (arXiv:2306.00978), GPTQ (arXiv:2210.17323) and pack-quantized checkpoints all mean (value - zero) * scale. They are
repacked once, on load, to one layout, which differs from that of linear layers (kernels/linear/reference.py): words
hold neighbours, so that a row of few inputs is not padded to a tile. Weight-only: activations keep their dtype. The
functions are the torch specification; the Triton twin is kernels/moe/triton_storage_int.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

BITS = (4, 8)
_LINE = 128  # bits of four words


@dataclass(frozen=True)
class IntMatrix:
    """`bits` bits a weight, and 16 or 32 bits a group; exact in float32."""

    # [E, N, ceil(K * bits / 128) * 4] int32: the integers of neighbouring inputs, the first in the lowest bits. Each
    # row begins where a load of 16 bytes may
    words: torch.Tensor
    # int32. With zero points: [E, N, G], zero << 16 | the bits of the scale. Without: [E, N, ceil(G / 2)], the bits of
    # two neighbouring groups' scales, the first in the lower half. One load of 32 bits: pipelines take no narrower ones
    groups: torch.Tensor
    in_features: int  # K
    num_groups: int  # G, of equally many neighbouring inputs
    bits: int  # one of BITS
    scale_dtype: torch.dtype  # float16 or bfloat16
    has_zeros: bool  # otherwise every zero point is 2^(bits - 1)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (E, N, K)."""
        num_experts, n, _ = self.words.shape
        return num_experts, n, self.in_features

    @property
    def group_size(self) -> int:
        """Inputs of a group; K if there is one."""
        return self.in_features // self.num_groups

    def dense(self, expert: int | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return one expert's matrix, [N, K]: (value - zero) * scale in float32, rounded once."""
        octets = self.words[expert].view(torch.uint8)
        codes = octets if self.bits == 8 else torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)
        grouped = codes[:, : self.in_features].float().unflatten(1, (self.num_groups, -1))
        scales, zeros = self._settings(expert)
        return ((grouped - zeros[..., None]) * scales[..., None]).flatten(1).to(dtype)

    def _settings(self, expert: int | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one expert's scales and zero points, [N, G] fp32."""
        groups = self.groups[expert]
        halves = groups.view(self.scale_dtype).unflatten(1, (-1, 2)).float()  # the lower half first
        if self.has_zeros:
            return halves[..., 0], (groups >> 16).float()
        scales = halves.flatten(1)[:, : self.num_groups]
        return scales, torch.full_like(scales, 1 << (self.bits - 1))


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integers [..., K] uint8 to IntMatrix.words. Padded inputs have the value 0."""
    assert bits in BITS
    codes = functional.pad(codes, (0, -codes.shape[-1] % (_LINE // bits)))
    octets = codes if bits == 8 else codes[..., 0::2] | (codes[..., 1::2] << 4)
    return octets.contiguous().view(torch.int32)


def pack_groups(scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    """Pack scales [..., G], fp16 or bf16, and zero points [..., G] uint8 to IntMatrix.groups."""
    if zeros is not None:
        low = scales.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
        return ((zeros.to(torch.int32) << 16) | low).contiguous()
    return functional.pad(scales, (0, scales.shape[-1] % 2)).contiguous().view(torch.int32)


def int_matrix_bytes(n: int, k: int, *, bits: int, num_groups: int, has_zeros: bool) -> int:
    """Return the bytes of one expert's matrix."""
    num_words = -(-k * bits // _LINE) * 4
    return 4 * n * (num_words + (num_groups if has_zeros else -(-num_groups // 2)))
