"""ModelRunner: an Executor on one device. Plans in, tokens out; sees both a plan and a tensor.

A step's life: forward() applies the plan to DeviceState, gathers the batch and launches the layers; sample() chooses
tokens, leaves them in DeviceState for the next step, and starts their copy to the host; wait() is the only sync.
"""

from __future__ import annotations

import torch
from torch import nn

from engine.device_state import DeviceState
from engine.input_batch import InputBatch, InputBatchBuilder
from engine.kv_cache import KVCachePlan
from engine.sampler import Sampled, Sampler
from engine.step import StepPlan, StepResult
from kernels.attention.base import AttentionBackend
from models.context import ForwardContext


class ModelRunner:
    """Owns the model, the KV pool and the device state of one device."""

    def __init__(
        self,
        model: nn.Module,
        *,
        kv_caches: list[tuple[torch.Tensor, torch.Tensor]],
        plan: KVCachePlan,
        backend: AttentionBackend,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.device = device
        self._model = model
        self._kv_caches = kv_caches
        self._backend = backend
        self._state = DeviceState(
            num_rows=max_num_seqs,
            max_blocks=-(-plan.max_model_len // plan.block_size),
            vocab_size=vocab_size,
            device=device,
        )
        self._builder = InputBatchBuilder(self._state, block_size=plan.block_size)
        self._sampler = Sampler(self._state)

    def forward(self, plan: StepPlan) -> _Step:
        """See Executor.forward."""
        with torch.inference_mode():
            if plan.inits:
                self._sampler.init(plan.inits)
            batch = self._builder.build(plan)
            ctx = ForwardContext(batch.positions, batch.attention, self._backend, self._kv_caches)
            hidden = self._model(batch.input_ids, ctx)
            self._state.num_computed[batch.req_index] = batch.attention.seq_lens.to(torch.int64)
            logits = self._model.compute_logits(hidden[batch.sample_tokens]) if batch.sample_rows else None
        return _Step(plan.step_id, batch, logits, self._sampler, self.device)

    def close(self) -> None:
        """Release the pool and the weights."""
        self._kv_caches = []
        del self._model


class _Step:
    """A step in flight; StepHandle."""

    def __init__(
        self, step_id: int, batch: InputBatch, logits: torch.Tensor | None, sampler: Sampler, device: torch.device
    ) -> None:
        self._step_id = step_id
        self._batch = batch
        self._logits = logits
        self._sampler = sampler
        self._device = device
        self._sampled: Sampled | None = None
        self._num_logprobs: dict[int, int | None] = {}
        self._done: torch.cuda.Event | None = None

    def sample(self) -> None:
        """See StepHandle.sample."""
        if self._logits is not None:
            # now, since a row's parameters change hands once the step is committed
            self._num_logprobs = self._sampler.num_logprobs(self._batch.sample_rows)
            with torch.inference_mode():
                self._sampled = self._sampler.sample(self._logits, self._batch).start_copy()
            self._logits = None
        if self._device.type == "cuda":
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> StepResult:
        """See StepHandle.wait."""
        if self._done is not None:
            self._done.synchronize()
        if self._sampled is None:
            return StepResult(self._step_id, [])
        token_ids, logprobs = self._sampled.to_lists(self._batch.sample_rows, self._num_logprobs)
        return StepResult(self._step_id, token_ids, logprobs)
