"""ModelRunner: an Executor on one device. Plans in, tokens out; sees both a plan and a tensor.

A step's life: forward() applies the plan to DeviceState and launches the layers (a graph when all rows decode, eager
when prompt chunks are among them); sample() chooses tokens, leaves them in DeviceState for the next step, and starts
their copy to the host; wait() is the only sync.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from engine.cuda_graph import DecodeGraphs
from engine.device_state import DeviceState
from engine.input_batch import InputBatch, InputBatchBuilder, SampleRows
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
        self._max_num_seqs = max_num_seqs
        self._max_model_len = plan.max_model_len
        self._state = DeviceState(
            num_rows=max_num_seqs,
            max_blocks=-(-plan.max_model_len // plan.block_size),
            vocab_size=vocab_size,
            device=device,
        )
        self._builder = InputBatchBuilder(self._state, block_size=plan.block_size)
        self._sampler = Sampler(self._state)
        self._graphs: DecodeGraphs | None = None

    def capture_graphs(self, on_progress: Callable[[int, int], None]) -> None:
        """Capture decode steps as CUDA graphs; from then on they are replayed. Blocks for seconds."""
        graphs = DecodeGraphs(
            lambda req_index: self._run_decode(req_index, self._max_model_len),
            max_num_seqs=self._max_num_seqs,
            padding_row=self._state.padding_row,
            device=self.device,
        )
        with torch.inference_mode():
            graphs.capture(on_progress)
        self._graphs = graphs

    def forward(self, plan: StepPlan) -> _Step:
        """See Executor.forward."""
        with torch.inference_mode():
            if plan.inits:
                self._sampler.init(plan.inits)
            self._builder.apply(plan)
            num_decodes = sum(1 for row in plan.rows if not row.token_ids)
            if num_decodes == len(plan.rows):
                req_index = self._builder.decode_req_index(plan.rows)
                if self._graphs is not None:
                    logits = self._graphs.replay(req_index)
                else:
                    logits = self._run_decode(req_index, max(row.start + 1 for row in plan.rows))
                sampling = SampleRows(plan.rows, req_index, self._state.num_computed[req_index])
            else:
                logits, sampling = self._run_mixed(plan, num_decodes)
        return _Step(plan.step_id, sampling, logits, self._sampler, self.device)

    def close(self) -> None:
        """Release the pool, the graphs and the weights."""
        self._kv_caches = []
        self._graphs = None
        del self._model

    def _run_decode(self, req_index: torch.Tensor, max_seq_len: int) -> torch.Tensor:
        """One token of each row; req_index: [R] int64 → logits [R, V]."""
        batch = self._builder.decode_batch(req_index, max_seq_len=max_seq_len)
        return self._model.compute_logits(self._forward(batch))

    def _run_mixed(self, plan: StepPlan, num_decodes: int) -> tuple[torch.Tensor, SampleRows]:
        """Rows of any kind → (logits [S, V] of those that sample, S possibly 0, and what they are)."""
        batch = self._builder.mixed_batch(plan.rows, num_decodes)
        hidden = self._forward(batch)
        last_tokens, req_index, positions = batch.last_tokens, batch.req_index, batch.attention.seq_lens
        rows = [row for row in plan.rows if row.samples]
        if len(rows) < len(plan.rows):
            samples = torch.tensor([i for i, row in enumerate(plan.rows) if row.samples], dtype=torch.int64)
            samples = samples.to(self.device, non_blocking=True)
            last_tokens, req_index, positions = last_tokens[samples], req_index[samples], positions[samples]
        logits = self._model.compute_logits(hidden[last_tokens])
        return logits, SampleRows(rows, req_index, positions.to(torch.int64))

    def _forward(self, batch: InputBatch) -> torch.Tensor:
        """Run the layers and note what is computed; returns hidden states [T, hidden_size]."""
        ctx = ForwardContext(batch.positions, batch.attention, self._backend, self._kv_caches)
        hidden = self._model(batch.input_ids, ctx)
        self._state.advance(batch.req_index, batch.attention.seq_lens)
        return hidden


class _Step:
    """A step in flight; StepHandle."""

    def __init__(
        self, step_id: int, sampling: SampleRows, logits: torch.Tensor, sampler: Sampler, device: torch.device
    ) -> None:
        self._step_id = step_id
        self._sampling = sampling
        self._logits = logits
        self._sampler = sampler
        self._device = device
        self._sampled: Sampled | None = None
        self._num_logprobs: dict[int, int | None] = {}
        self._done: torch.cuda.Event | None = None

    def sample(self) -> None:
        """See StepHandle.sample."""
        if self._sampling.rows:
            # now, since a row's parameters change hands once the step is committed
            self._num_logprobs = self._sampler.num_logprobs(self._sampling.rows)
            with torch.inference_mode():
                self._sampled = self._sampler.sample(self._logits, self._sampling).start_copy()
        if self._device.type == "cuda":
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> StepResult:
        """See StepHandle.wait."""
        if self._done is not None:
            self._done.synchronize()
        if self._sampled is None:
            return StepResult(self._step_id, [])
        token_ids, logprobs = self._sampled.to_lists(self._sampling.rows, self._num_logprobs)
        return StepResult(self._step_id, token_ids, logprobs)
