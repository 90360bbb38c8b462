"""Sampler: samples tokens from logits, for rows with any mix of parameters. Imports torch.

It owns the host's copy of each row's parameters. The host decides from the plan which operations a batch needs (noise,
truncation, penalties, bias, masks, logprobs), without reading the device, and keeps the result while the same rows
sample: a batch of greedy rows costs one argmax. Rows with adjusted logits or logprobs are computed separately, so other
rows cost nothing extra.
A token mask is applied last and overrides bias and penalties. It already includes the restrictions of min_tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from engine.core.step import RequestInit, TokenMasks
from engine.device.device_state import DeviceState
from engine.device.input_batch import SamplingMetadata
from engine.interface.protocol import TokenLogprobs
from kernels.dispatch import HAS_TRITON
from kernels.ops import TokenSampler, allow_only, penalize
from kernels.sampling.reference import NO_TOKEN, SamplingState, Truncation, add_bias, sample, top_logprobs
from models.parallel import ALONE, TensorParallel

_Bias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # rows, token ids, values


@dataclass
class Sampled:
    """One step's S sampled tokens, with logprobs if requested; on the device or, from start_copy(), the host."""

    # [S] int64; NO_TOKEN where the logits are not finite
    token_ids: torch.Tensor
    # of the L rows with logprobs: [L] float32, [L, n] int64, [L, n] float32
    logprobs: tuple[torch.Tensor, ...] | None
    # of these L rows: the row, and the number of its most likely tokens
    num_logprobs: dict[int, int]

    def start_copy(self) -> Sampled:
        """Return a copy on the host: on CUDA asynchronous, to pinned memory, complete once the stream is."""
        logprobs = None if self.logprobs is None else tuple(to_host(tensor) for tensor in self.logprobs)
        return Sampled(to_host(self.token_ids), logprobs, self.num_logprobs)

    def to_lists(self) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """Return the token ids, and the logprobs of the rows that have some."""
        token_ids = self.token_ids.tolist()
        if self.logprobs is None:
            return token_ids, {}
        lists = zip(self.num_logprobs.items(), *(tensor.tolist() for tensor in self.logprobs), strict=True)
        return token_ids, {row: TokenLogprobs(chosen, ids[:n], values[:n]) for (row, n), chosen, ids, values in lists}


@dataclass
class _Group:
    """Sampling settings of rows that are sampled in one call."""

    is_greedy: bool
    has_truncation: bool
    truncation: Truncation | None  # for torch; the Triton kernel reads the state itself


@dataclass
class _Layout:
    """The operations that the rows of `req_index` need; those of `constrained` have a token mask.

    Valid until another request takes one of these rows.
    """

    req_index: bytes
    constrained: list[int]
    everyone: _Group
    # [A] int64 rows of this step whose logits are adjusted; in the next fields, rows are indices into these A
    adjusted: torch.Tensor | None
    adjusted_group: _Group
    penalized: torch.Tensor | None  # [P] int64 rows
    masked: torch.Tensor | None  # [C] int64 rows, in the order of `constrained`
    bias: _Bias | None
    min_tokens_rows: dict[int, int]  # row of this step → row
    # [L] int64 rows of this step with logprobs, and the number of each
    logprob_rows: torch.Tensor | None
    num_logprobs: dict[int, int]
    banned_rows: list[int] = field(default_factory=list)  # rows of min_tokens_rows that are still too short
    banned: _Bias | None = None


class Sampler:
    """Samples each step's tokens over one DeviceState."""

    def __init__(self, state: DeviceState, *, max_rows: int, tp: TensorParallel = ALONE) -> None:
        """max_rows: maximum number of sampled positions per step. tp: the ranks that run the same plans."""
        self._state = state
        self._tp = tp
        self._inits: dict[int, RequestInit] = {}
        self._layout: _Layout | None = None
        self._token_sampler: TokenSampler | None = None
        if HAS_TRITON and state.device.type == "cuda":
            sampling = SamplingState(
                temperature=state.temperature,
                top_p=state.top_p,
                min_p=state.min_p,
                top_k=state.top_k,
                seeds=state.seeds,
                last_token=state.last_token,
            )
            self._token_sampler = TokenSampler(sampling, vocab_size=state.vocab_size, max_rows=max_rows)

    def init(self, inits: list[RequestInit]) -> None:
        """Store the parameters of new requests."""
        for init in inits:
            self._inits[init.req_index] = init
        self._layout = None

    def sample(
        self, logits: torch.Tensor, sampling: SamplingMetadata, masks: TokenMasks | None = None
    ) -> Sampled | None:
        """Sample a token for each row of logits [S, V], and store it in the state. Does not sync.

        With several ranks only the first samples, so that tokens never differ; the others receive them, return None.
        """
        sampled = self._sample(logits, sampling, masks) if self._tp.rank == 0 else None
        self._tp.broadcast(self._state.last_token)
        return sampled

    def truncates_plain(self, host_req_index: np.ndarray) -> bool | None:
        """Return whether rows without masks have top-k, top-p or min-p; None: sample_plain() cannot sample them all.

        host_req_index: [R] int32, on the host.
        """
        layout = self._layout_of(host_req_index, [])
        if layout.adjusted is not None or layout.logprob_rows is not None:
            return None
        has_truncation = layout.everyone.has_truncation
        return None if has_truncation and self._token_sampler is None else has_truncation

    def sample_plain(
        self,
        logits: torch.Tensor,
        req_index: torch.Tensor,
        positions: torch.Tensor,
        *,
        has_truncation: bool,
        out: torch.Tensor,
    ) -> None:
        """As sample(), of rows for which truncates_plain() is not None, and padding rows. Graph-safe with Triton.

        out: [S] int64, the tokens, which are also in the state. Only with one rank.
        """
        if self._token_sampler is None:
            out.copy_(self._choose(logits, req_index, positions, _Group(False, False, None)))
            return
        self._token_sampler(logits, req_index=req_index, positions=positions, has_truncation=has_truncation, out=out)

    def _sample(self, logits: torch.Tensor, sampling: SamplingMetadata, masks: TokenMasks | None) -> Sampled:
        layout = self._layout_of(sampling.host_req_index, masks.req_indices if masks else [])
        req_index, adjusted = sampling.req_index, layout.adjusted
        if adjusted is None:
            token_ids = self._choose(logits, req_index, sampling.positions, layout.everyone)
        else:
            if adjusted.shape[0] < req_index.shape[0]:
                token_ids = self._choose(logits, req_index, sampling.positions, layout.everyone)
            else:
                token_ids = torch.empty_like(req_index)
            rows, changed = req_index[adjusted], logits[adjusted].float()
            # read first: a mask hides NaN of forbidden tokens
            is_finite = None if layout.masked is None else changed.amax(dim=-1) < float("inf")
            self._adjust(changed, sampling, layout, masks)
            chosen = self._choose(changed, rows, sampling.positions[adjusted], layout.adjusted_group)
            token_ids[adjusted] = chosen if is_finite is None else torch.where(is_finite, chosen, NO_TOKEN)
            if layout.penalized is not None and self._state.output_counts is not None:
                places = rows[layout.penalized], chosen[layout.penalized].clamp(min=0)
                ones = torch.ones_like(layout.penalized, dtype=torch.int32)
                self._state.output_counts.index_put_(places, ones, accumulate=True)
        asked = layout.logprob_rows
        logprobs = None
        if asked is not None:
            most = max(layout.num_logprobs.values())
            logprobs = top_logprobs(logits[asked], token_ids[asked].clamp(min=0), most)
        return Sampled(token_ids, logprobs, layout.num_logprobs)

    def _choose(
        self, logits: torch.Tensor, req_index: torch.Tensor, positions: torch.Tensor, group: _Group
    ) -> torch.Tensor:
        """Return a token, or NO_TOKEN, for each row of logits [S, V]; store it in the state's last_token."""
        if self._token_sampler is not None:
            return self._token_sampler(
                logits, req_index=req_index, positions=positions, has_truncation=group.has_truncation
            )
        if group.is_greedy:
            largest, token_ids = logits.max(dim=-1)  # as in sample()
            token_ids = torch.where(largest < float("inf"), token_ids, NO_TOKEN)
        else:
            token_ids = sample(
                logits.float(),
                temperature=self._state.temperature[req_index],
                seeds=self._state.seeds[req_index],
                positions=positions,
                truncation=group.truncation,
            )
        self._state.last_token[req_index] = token_ids.clamp(min=0)  # the next step may embed it
        return token_ids

    def _adjust(
        self, logits: torch.Tensor, sampling: SamplingMetadata, layout: _Layout, masks: TokenMasks | None
    ) -> None:
        """Apply bias, bans, penalties and masks to logits [A, V] float32, in place."""
        for bias in (layout.bias, self._banned_until_min_tokens(sampling, layout)):
            if bias is not None:
                add_bias(logits, *bias)
        if layout.penalized is not None and self._state.output_counts is not None and self._state.in_prompt is not None:
            penalize(
                logits,
                layout.penalized,
                sampling.req_index[layout.adjusted][layout.penalized],
                output_counts=self._state.output_counts,
                in_prompt=self._state.in_prompt,
                presence=self._state.presence,
                frequency=self._state.frequency,
                repetition=self._state.repetition,
            )
        if layout.masked is not None and masks is not None:
            words = np.frombuffer(bytearray(masks.words), dtype=np.int32).reshape(len(masks.req_indices), -1)
            allow_only(logits, layout.masked, self._state.staging.send_large(words))

    def _banned_until_min_tokens(self, sampling: SamplingMetadata, layout: _Layout) -> _Bias | None:
        """Return a bias that bans the stop tokens of rows below min_tokens; rebuilt only when such a row reaches it."""
        inits = {i: self._inits[int(sampling.host_req_index[i])] for i in layout.min_tokens_rows}
        num_output = {i: int(sampling.host_ends[i]) - init.num_prompt_tokens for i, init in inits.items()}
        short = [i for i, init in inits.items() if num_output[i] < init.params.min_tokens]
        if short != layout.banned_rows:
            bans = [
                (layout.min_tokens_rows[i], t, float("-inf")) for i in short for t in inits[i].params.stop_token_ids
            ]
            layout.banned_rows, layout.banned = short, self._bias(bans)
        return layout.banned

    def _bias(self, entries: list[tuple[int, int, float]]) -> _Bias | None:
        if not entries:
            return None
        rows, token_ids, values = zip(*entries, strict=True)
        send = self._state.staging.send
        return send(np.array(rows)), send(np.array(token_ids)), send(np.array(values, dtype=np.float32))

    def _layout_of(self, host_req_index: np.ndarray, constrained: list[int]) -> _Layout:
        key, layout = host_req_index.tobytes(), self._layout
        if layout is None or layout.req_index != key or layout.constrained != constrained:
            layout = self._layout = self._make_layout(host_req_index.tolist(), constrained, key=key)
        return layout

    def _make_layout(self, req_indices: list[int], constrained: list[int], *, key: bytes) -> _Layout:
        params = [self._inits[index].params for index in req_indices]
        with_mask = set(constrained)
        masked = [index in with_mask for index in req_indices]
        limited = [bool(p.min_tokens and p.stop_token_ids and not masked[i]) for i, p in enumerate(params)]
        adjusted = [i for i, p in enumerate(params) if p.has_penalties or p.logit_bias or limited[i] or masked[i]]
        places = {req_indices[i]: row for row, i in enumerate(adjusted)}
        bias = [(row, t, v) for row, i in enumerate(adjusted) for t, v in params[i].logit_bias.items()]
        logprobs = {i: p.logprobs for i, p in enumerate(params) if p.logprobs is not None}
        return _Layout(
            key,
            constrained,
            everyone=self._make_group(req_indices),
            adjusted=self._rows(adjusted),
            adjusted_group=self._make_group([req_indices[i] for i in adjusted]),
            penalized=self._rows([row for row, i in enumerate(adjusted) if params[i].has_penalties]),
            masked=self._rows([places[index] for index in constrained]),
            bias=self._bias(bias),
            min_tokens_rows={i: row for row, i in enumerate(adjusted) if limited[i]},
            logprob_rows=self._rows(list(logprobs)),
            num_logprobs=logprobs,
        )

    def _make_group(self, req_indices: list[int]) -> _Group:
        drawn = [p for p in (self._inits[index].params for index in req_indices) if not p.is_greedy]
        has_truncation = any(p.top_k or p.top_p < 1.0 or p.min_p for p in drawn)
        if not has_truncation or self._token_sampler is not None:
            return _Group(is_greedy=not drawn, has_truncation=has_truncation, truncation=None)
        rows = torch.tensor(req_indices, device=self._state.device)
        truncation = Truncation(
            top_k=self._state.top_k[rows],
            top_p=self._state.top_p[rows],
            min_p=self._state.min_p[rows],
            max_top_k=max(p.top_k for p in drawn) if all(p.top_k for p in drawn) else 0,
        )
        return _Group(is_greedy=False, has_truncation=True, truncation=truncation)

    def _rows(self, rows: list[int]) -> torch.Tensor | None:
        return self._state.staging.send(np.array(rows)) if rows else None


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host: on CUDA asynchronous, to pinned memory, complete once the stream is."""
    if tensor.device.type != "cuda":
        return tensor.to("cpu")
    # torch's caching host allocator reuses a pinned block only after copies into it are complete
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
