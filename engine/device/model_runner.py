"""ModelRunner: the Executor of one device, which turns a StepPlan into sampled tokens. Imports torch.

A step's life: forward() applies the plan to DeviceState and launches the layers (by a CUDA graph where one fits, else
kernel by kernel); sample() chooses tokens, leaves them in DeviceState for the next step, and starts
their copy to the host; wait() is the only sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.core.step import StepHandle, StepPlan, StepResult, TokenMasks
from engine.device.cuda_graph import (
    DecodeGraphs,
    Layers,
    MixedGraphs,
    max_step_tokens,
    mixed_shapes,
)
from engine.device.decode_tails import DecodeStep, DecodeTails
from engine.device.device_state import DeviceState, Staging
from engine.device.graph_captures import GraphCaptures
from engine.device.graph_device import GraphDevice, Interruption
from engine.device.host_pages import HostPages
from engine.device.input_batch import (
    InputBatch,
    InputBatchBuilder,
    MixedShape,
    PackedStep,
    RowColumns,
    SamplingMetadata,
)
from engine.device.kv_cache import KVCachePlan, KVPool
from engine.device.prompt_outputs import PromptLogprobsComputer, PromptOutputs, pool
from engine.device.sampler import Sampled, Sampler
from engine.device.step_states import StateRows
from engine.tensor_parallel.process_group import agree
from kernels.attention.base import AttentionBackend, AttentionMetadata
from kernels.ops import LoraTokens, allow_only
from models.build import Model
from models.config.model_config import ModelConfig
from models.context import ForwardContext, LayerKV
from models.parallel import TensorParallel


class ModelRunner:
    """Owns the model, the KV pool and the device state of one device."""

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        *,
        kv_pool: KVPool,
        plan: KVCachePlan,
        backend: AttentionBackend,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_samples: int | None,
        num_drafts: int,
        device: torch.device,
        dtype: torch.dtype,
        lora_tokens: LoraTokens | None,
        tp: TensorParallel,
        has_groups: bool,
        host_pages: HostPages | None,
    ) -> None:
        """config: of the whole model, also where this rank has a share of it.

        max_num_samples: maximum number of sampled positions of a step with drafts; None: no drafts. num_drafts: the
        most of a row. dtype: of the model. lora_tokens: adapter indices that the model's linear layers read; None: no
        adapters. tp: the ranks that run the same plans; the first samples and broadcasts the tokens.
        has_groups: plans may group rows. host_pages: host memory behind the pool.
        """
        self.device = device
        self._tp = tp
        self._model = model
        self._kv_pool = kv_pool
        self._backend = backend
        share = config.share_of_rank(tp.size, is_expert_parallel=tp.is_expert_parallel)
        self._latent = share.latent_sizes
        self._has_groups = has_groups
        self._max_num_seqs = max_num_seqs
        self._max_model_len = plan.max_model_len
        # A step has up to 5 values of 4 bytes per token and row; new requests and blocks rarely need as much again
        staging = Staging(device, num_bytes=64 * (max_num_batched_tokens + max_num_seqs))
        self._state = DeviceState(
            num_rows=max_num_seqs,
            max_blocks=plan.pages.num_columns(plan.max_model_len),
            num_tables=len(plan.pages.table_groups),
            num_state_pages=plan.pages.state_pages,
            vocab_size=config.vocab_size,
            device=device,
            staging=staging,
            has_loras=lora_tokens is not None,
            has_counts=config.has_lm_head and tp.rank == 0,
        )
        self._shapes = mixed_shapes(max_num_seqs, max_num_batched_tokens, max_num_samples=max_num_samples)
        max_tokens = max_step_tokens(max_num_seqs, max_num_batched_tokens)
        max_rows = self._shapes[-1].num_rows
        max_mixed = MixedShape(max_tokens, max_rows, max_rows)
        state_rows = None
        if plan.pages.state is not None:
            state_rows = StateRows(
                self._state, kv_pool.states, share.states, num_drafts=num_drafts, max_rows=max_rows, dtype=dtype
            )
        self._builder = InputBatchBuilder(
            self._state,
            pages=plan.pages,
            num_pages=plan.num_pages,
            max_mixed=max_mixed,
            lora_tokens=lora_tokens,
            states=state_rows,
        )
        self._sampler = Sampler(self._state, max_rows=max_rows, tp=tp)
        self._prompt_logprobs = PromptLogprobsComputer(staging, vocab_size=config.vocab_size, max_num_seqs=max_num_seqs)
        self.host_pages = host_pages
        self._decode_graphs: DecodeGraphs | None = None
        self._tails: DecodeTails | None = None
        self.mixed_graphs: MixedGraphs | None = None
        self._interruption = Interruption()

    @property
    def kv_layers(self) -> Sequence[LayerKV | None]:
        """Each layer's part of the pool; None: a layer without attention."""
        return self._kv_pool.layers

    def plan_graphs(self, device: GraphDevice, *, layers: Layers) -> GraphCaptures:
        """Return the captures of decode and mixed steps, for replay_graphs(). layers: one of each kind."""
        decode = DecodeGraphs(
            lambda req_index, is_grouped, layers: self._run_decode(
                req_index, self._max_model_len, is_grouped=is_grouped, layers=layers
            ),
            max_num_seqs=self._max_num_seqs,
            padding_row=self._state.padding_row,
            device=self.device,
            has_groups=self._has_groups,
        )
        mixed = MixedGraphs(
            lambda shape, is_grouped, layers: self._run_mixed(
                shape, self._max_model_len, is_grouped=is_grouped, layers=layers
            ),
            shapes=self._shapes,
            has_groups=self._has_groups,
        )
        layers = layers if self._tp.size == 1 else None
        return GraphCaptures(
            decode,
            mixed,
            device,
            layers=layers,
            agree=lambda numbers: agree(self._tp, numbers, self.device),
            interruption=self._interruption,
        )

    def replay_graphs(self, captures: GraphCaptures) -> None:
        """Let forward() replay graphs of plan_graphs(), after captures.capture()."""
        self._decode_graphs, self.mixed_graphs = captures.decode, captures.mixed
        if self._tp.size == 1:  # else every rank has its share of the logits
            self._tails = DecodeTails(self._run_tail, captures.decode, device=self.device)

    def measure_host_page_s(self) -> float:
        """Return the seconds in which a page comes from host memory; 0 without it. Before the first step; blocks."""
        with torch.inference_mode():
            return 0.0 if self.host_pages is None else self.host_pages.measure_page_s(self._state.staging)

    def forward(self, plan: StepPlan) -> StepHandle:
        """See Executor.forward."""
        with torch.inference_mode():
            if plan.zeroed:
                self._kv_pool.zero(plan.zeroed, self._state.staging)
            if plan.num_rows:
                step: StepHandle = self._forward(plan)
            else:
                self._begin_copies(plan)
                step = self._empty_step(plan)
            if self.host_pages is not None:
                self.host_pages.join()
                if self.host_pages.pins is not None:
                    self.host_pages.pins.note_step()
        return step

    def run_masks(self) -> None:
        """Launch the kernels of token masks, for precompilation: other requests do not use them."""
        with torch.inference_mode():
            logits = torch.zeros(1, self._state.vocab_size, device=self.device)
            masks = torch.zeros(1, -(-self._state.vocab_size // 32), dtype=torch.int32, device=self.device)
            allow_only(logits, torch.zeros(1, dtype=torch.int64, device=self.device), masks)

    def close(self) -> None:
        """Release the pool, the graphs and the weights."""
        self._decode_graphs = self.mixed_graphs = self._tails = None
        if self.host_pages is not None:
            self.host_pages.close()
        del self._model, self._kv_pool

    def _begin_copies(self, plan: StepPlan) -> None:
        """Launch copies from and to host memory, behind the step's inputs: one copy engine carries both, in order."""
        if plan.copies_to_host or plan.copies_from_host:
            assert self.host_pages is not None
            self.host_pages.begin(plan, self._state.staging)

    def _empty_step(self, plan: StepPlan) -> _Step:
        """Return a step without rows."""
        assert not plan.inits
        assert not plan.shares
        on_host, nothing = np.empty(0, np.int32), torch.empty(0, dtype=torch.int64)
        sampling = SamplingMetadata(on_host, on_host, nothing, nothing)
        return _Step(plan.step_id, sampling, nothing, self._sampler, self.device)

    def _forward(self, plan: StepPlan) -> StepHandle:
        """Launch the layers of a step with rows."""
        # Before states are settled: no row from whose start a state is saved follows a row with drafts
        if plan.copies_in:
            self._kv_pool.copy(plan.copies_in, self._state.staging)
        if plan.copies_out:
            self._kv_pool.copy(plan.copies_out, self._state.staging)
        if plan.inits:
            self._prompt_logprobs.init(plan.inits)
        rows = RowColumns.of(plan)
        step: StepHandle
        if rows.num_decodes == plan.num_rows:
            step = self._forward_decodes(plan, rows)
        elif any(row.needs_hidden for row in plan.singles):
            step = self._make_step(plan.step_id, *self._forward_whole(plan, rows))
        else:
            step = self._make_step(plan.step_id, *self._forward_mixed(plan, rows))
        if plan.inits:  # behind what they are not needed for
            self._sampler.init(plan.inits)
            self._state.init_sampling(plan.inits)
        return step

    def _make_step(
        self, step_id: int, hidden: torch.Tensor, sampling: SamplingMetadata, of_prompts: PromptOutputs | None = None
    ) -> _Step:
        """Launch the logits of hidden [S, hidden_size]; return the step, to be sampled kernel by kernel."""
        logits = self._model.compute_logits(hidden) if len(sampling.req_index) else hidden
        return _Step(step_id, sampling, logits, self._sampler, self.device, of_prompts)

    def _forward_decodes(self, plan: StepPlan, rows: RowColumns) -> StepHandle:
        """Launch the layers of a step of decode rows; by a graph with a tail, also the logits when it is sampled."""
        req_index = self._builder.pack_decodes(plan)
        self._begin_copies(plan)
        graphs, tails = self._decode_graphs, self._tails

        def as_kernels(hidden: torch.Tensor) -> _Step:
            positions = self._state.num_computed[req_index]
            sampling = SamplingMetadata(rows.req_index, rows.ends, req_index, positions)
            return self._make_step(plan.step_id, hidden, sampling)

        if graphs is None:
            return as_kernels(self._run_decode(req_index, int(rows.ends.max()), is_grouped=plan.is_grouped))
        size = graphs.replay(req_index, is_grouped=plan.is_grouped)
        if tails is None or not tails.takes(size):
            return as_kernels(graphs.output(size)[0][: plan.num_rows])
        return DecodeStep(plan.step_id, rows.req_index, size, tails, self._sampler, as_kernels)

    def _run_tail(self, hidden: torch.Tensor, req_index: torch.Tensor, has_truncation: bool, out: torch.Tensor) -> None:
        """See engine.device.decode_tails.RunTail."""
        positions, logits = self._state.num_computed[req_index], self._model.compute_logits(hidden)
        self._sampler.sample_plain(logits, req_index, positions, has_truncation=has_truncation, out=out)

    def _run_decode(
        self, req_index: torch.Tensor, max_seq_len: int, *, is_grouped: bool, layers: Layers = None
    ) -> torch.Tensor:
        """Run one token of each row; req_index: [R] int64 → hidden [R, hidden_size]."""
        batch = self._builder.decode_batch(req_index, max_seq_len=max_seq_len, is_grouped=is_grouped)
        return self._last_hidden(batch, layers)

    def _forward_mixed(self, plan: StepPlan, rows: RowColumns) -> tuple[torch.Tensor, SamplingMetadata]:
        """Run rows of any kind; return hidden [S, hidden_size] of the S ≥ 0 sampled positions, and their metadata."""
        exact, shape, is_grouped = rows.shape, None, False
        if self.mixed_graphs is not None and not self._expands(rows):  # with one more row, for padding
            num_prefills = plan.num_rows - rows.num_decodes
            needed = MixedShape(exact.num_tokens, max(exact.num_rows, plan.num_rows + 1), num_prefills + 1)
            shape = self.mixed_graphs.fitting_shape(needed)
            if shape is not None and plan.is_grouped:
                grouped = self.mixed_graphs.grouped_shape(needed, shape, spared_s=plan.spared_us * 1e-6)
                shape, is_grouped = grouped or shape, grouped is not None
        packed = self._builder.pack(plan, rows, shape or exact)
        self._begin_copies(plan)
        if self.mixed_graphs is not None and shape is not None:
            hidden = self.mixed_graphs.replay(packed, is_grouped=is_grouped)
        else:
            hidden = self._last_hidden(self._exact_batch(packed, is_grouped=plan.is_grouped))
        return hidden[: len(packed.sampling.req_index)], packed.sampling

    def _expands(self, rows: RowColumns) -> bool:
        """Return True if latent attention expands rows of a step, for which the host must know their lengths."""
        if self._latent is None:
            return False
        row_lens = list(zip(rows.num_tokens.tolist(), rows.ends.tolist(), strict=True))
        return self._latent.expands(row_lens, is_cuda=self.device.type == "cuda")

    def _forward_whole(
        self, plan: StepPlan, columns: RowColumns
    ) -> tuple[torch.Tensor, SamplingMetadata, PromptOutputs]:
        """As _forward_mixed, with prompt outputs. Never uses a graph, since graphs return only last hidden states."""
        rows = plan.rows
        packed = self._builder.pack(plan, columns, columns.shape)
        self._begin_copies(plan)
        batch = self._exact_batch(packed, is_grouped=plan.is_grouped)
        hidden = self._run_layers(batch)
        of_prompts = PromptOutputs()
        if any(row.prompt_logprobs is not None for row in rows):
            of_prompts.logprobs = self._prompt_logprobs.compute(rows, hidden, self._model.compute_logits)
        if any(row.pool_span is not None for row in rows):
            of_prompts.sums = pool(rows, hidden, self._state.staging)
        return hidden[batch.last_tokens][: len(packed.sampling.req_index)], packed.sampling, of_prompts

    def _exact_batch(self, packed: PackedStep, *, is_grouped: bool) -> InputBatch:
        """Gather a packed step with exact bounds. Beside graphs rows are not grouped: a kernel would be compiled."""
        row_lens = packed.row_lens
        return self._builder.mixed_batch(
            packed,
            max_query_len=max(count for count, end in row_lens if end),
            max_seq_len=max(end for _, end in row_lens),
            row_lens=row_lens,
            is_grouped=is_grouped and self.mixed_graphs is None,
        )

    def _run_mixed(
        self, shape: MixedShape, max_seq_len: int, *, is_grouped: bool, layers: Layers = None
    ) -> torch.Tensor:
        """Run the step in the packed buffer; return hidden [R, hidden_size], first the rows that sample."""
        packed = self._builder.blank_step(shape)
        batch = self._builder.mixed_batch(
            packed, max_query_len=shape.num_tokens, max_seq_len=max_seq_len, is_grouped=is_grouped
        )
        return self._last_hidden(batch, layers)

    def _last_hidden(self, batch: InputBatch, layers: Layers = None) -> torch.Tensor:
        """Run the layers; return the hidden states [R, hidden_size] of the batch's last tokens."""
        hidden = self._run_layers(batch, layers)
        return hidden if batch.last_tokens is None else hidden[batch.last_tokens]

    def _run_layers(self, batch: InputBatch, layers: Layers = None) -> torch.Tensor:
        """Run the layers, by default all; return the hidden states [T, hidden_size] of all tokens of a batch."""
        prepared: list[AttentionMetadata] = []
        for metadata in batch.attention:  # rows and their lengths are the same
            twin = next((other for other in prepared if other.shared is metadata.shared), None)
            if twin is None:
                self._backend.prepare(metadata)
                prepared.append(metadata)
            else:
                metadata.decode_pieces, metadata.grouped_rows = twin.decode_pieces, twin.grouped_rows
        ctx = ForwardContext(
            batch.positions,
            batch.attention,
            self._backend,
            self._kv_pool.layers,
            states=batch.states,
            only_layers=layers,
            before_layer=None if self._interruption.is_wanted is None else self._interruption.check,
        )
        return self._model(batch.input_ids, ctx)


@dataclass(eq=False)
class _Step:
    """The StepHandle of a ModelRunner."""

    step_id: int
    sampling: SamplingMetadata
    logits: torch.Tensor
    sampler: Sampler
    device: torch.device
    of_prompts: PromptOutputs | None = None
    _sampled: Sampled | None = None
    _done: torch.cuda.Event | None = None

    def sample(self, masks: TokenMasks | None = None) -> None:
        """See StepHandle.sample."""
        if len(self.sampling.req_index):
            with torch.inference_mode():
                sampled = self.sampler.sample(self.logits, self.sampling, masks)
                self._sampled = None if sampled is None else sampled.start_copy()
        if self.device.type == "cuda":
            self._done = torch.cuda.Event()
            self._done.record()

    def is_done(self) -> bool:
        """See StepHandle.is_done."""
        return self._done is None or self._done.query()

    def wait(self) -> StepResult:
        """See StepHandle.wait."""
        if self._done is not None:
            self._done.synchronize()
        result = StepResult(self.step_id, [])
        if self._sampled is not None:
            result.token_ids, result.logprobs = self._sampled.to_lists()
        if self.of_prompts is not None:
            self.of_prompts.add_to(result)
        return result
