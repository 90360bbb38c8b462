"""OfflineEngine: runs a model with the engine's loop inside this process, without HTTP. Imports torch.

engine = OfflineEngine.load(EngineConfig(model="./my-model"))
generations = engine.generate([[1, 2, 3]], [SamplingParams(max_tokens=16)])
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np

from engine.core.local_client import GenerationResult, LocalTransport, generate
from engine.grammar.compiler import CompilerLoader
from engine.interface.config import EngineConfig
from engine.interface.errors import StartupError
from engine.interface.metrics import Metrics
from engine.interface.protocol import PoolingKind, SamplingParams
from engine.startup.device_choice import resolve_device
from engine.startup.load import OnStage, load_engine, rehearse
from engine.startup.loaded_engine import LoadedEngine
from engine.tensor_parallel.ranks import RankHost

_WARM_UP_ROWS = 66  # one more than the last batch size with its own kernels
_KINDS = (
    SamplingParams(max_tokens=2, temperature=0.0),
    SamplingParams(max_tokens=2),
    SamplingParams(max_tokens=2, top_k=20, top_p=0.9, logprobs=1),
)
# Rows with adjusted logits are sampled separately, in float32
_ADJUSTED_KINDS = (
    SamplingParams(max_tokens=2, temperature=0.0, logit_bias={0: 1.0}),
    SamplingParams(max_tokens=2, top_k=20, presence_penalty=1.0),
)
_PROMPT_LENS = (29, 103, 252, 402, 502, 702, 5000, 8002)  # approximate number of prompt tokens of a step
_EXPERTS_PROMPT_LENS = (602, 902, 1102, 1602, 3002)  # their kernels differ by an expert's pairs, in the mean
# A repetitive prompt gets drafts
_DRAFTED_PROMPT, _DRAFTED_KIND = [0] * 12, SamplingParams(max_tokens=8, top_k=20)


class OfflineEngine:
    """A loaded model with its own scheduler, prefix cache and loop."""

    def __init__(self, loaded: LoadedEngine, *, overlap_depth: int | None = None) -> None:
        self.loaded = loaded
        self.transport = LocalTransport()
        self.engine = loaded.engine(self.transport, Metrics(), overlap_depth=overlap_depth)
        if self.engine.launch_delay is not None:
            self.engine.launch_delay.is_on = False  # no request comes while a step runs

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        on_stage: OnStage = lambda stage: None,
        *,
        host: RankHost | None = None,
        leaves_rest: bool = False,
        takes_over: bool = False,
        compiler_loader: CompilerLoader | None = None,
    ) -> OfflineEngine:
        """Load a model. Blocks. Raises StartupError.

        host: settings of the other ranks of a split model; None: the exit of a rank ends this process.
        leaves_rest, takes_over, compiler_loader: as in load_engine().
        """
        return cls(
            load_engine(
                config,
                on_stage,
                serve=lambda loaded: cls(loaded).run_workload(),
                host=host,
                leaves_rest=leaves_rest,
                takes_over=takes_over,
                compiler_loader=compiler_loader,
            )
        )

    @classmethod
    def rehearse(cls, config: EngineConfig) -> bool:
        """Do beside a serving engine what else a takeover would do; see rehearse_beside(). Raises StartupError."""
        return rehearse(config, lambda loaded: cls(loaded).self_test())

    @staticmethod
    def fits_beside(config: EngineConfig) -> bool:
        """Return whether two engines of a configuration can be loaded: they share no device, pinned memory or disk."""
        is_plain = config.tensor_parallel_size == 1 and not config.kv_host_memory_bytes and config.kv_disk is None
        return is_plain and resolve_device(config.device).type == "cpu"

    def generate(
        self, prompts: list[list[int]], params: list[SamplingParams], *, lora_indices: Sequence[int] | None = None
    ) -> list[GenerationResult]:
        """Run all prompts and return the results in order; a failed prompt has `error` set. Blocks.

        lora_indices: each prompt's adapter, counted from 1 in EngineConfig.loras; 0: the base model.
        """
        return generate(self.engine, self.transport, prompts, params, lora_indices=lora_indices)

    def embed(self, prompts: list[list[int]], kind: PoolingKind) -> list[GenerationResult]:
        """Compute each prompt's embedding, not normalised; a failed prompt has `error` set. Blocks."""
        params, kinds = [SamplingParams(max_tokens=1)] * len(prompts), [kind] * len(prompts)
        return generate(self.engine, self.transport, prompts, params, kinds)

    def self_test(self, *, is_short: bool = False) -> None:
        """Generate tokens, or an embedding, and check them. Raises StartupError.

        is_short: few greedy rows alone, as a rehearsal has loaded the kernels of the others.
        On CUDA it runs small batch sizes, greedy and sampled, so that no client's request loads a kernel.
        """
        if not self.loaded.model_config.has_lm_head:
            for generation in self.embed([[0]] * 2, "last"):
                if generation.error is not None:
                    raise StartupError(f"The self-test failed: {generation.error.message}")
                if not np.isfinite(np.frombuffer(generation.embedding, dtype=np.float32)).all():
                    raise StartupError("The self-test gave an embedding with numbers that are not finite.")
            return
        num_requests = 1
        if self.loaded.runner.device.type == "cuda" and not is_short:
            num_requests = min(_WARM_UP_ROWS, self.loaded.scheduler_config.max_num_seqs)
        # requests end together such that the batch passes through each of these sizes
        sizes = [num_requests, *(size for size in reversed(_batch_sizes()) if size < num_requests)]
        ends = [2 + next(i for i, size in enumerate([*sizes[1:], 0]) if size <= row) for row in range(num_requests)]
        for kind in _KINDS if num_requests > 1 else _KINDS[:1]:
            self._test([msgspec.structs.replace(kind, max_tokens=end) for end in ends], [0] * num_requests)
        if self.loaded.num_loras:
            self._test([_KINDS[0]] * self.loaded.num_loras, list(range(1, self.loaded.num_loras + 1)))

    def run_workload(self) -> None:
        """Run batches and prompts of every size and kind, for precompilation. Discards the results."""
        sizes, sizes_of_prompts = _rehearsed_sizes(self.loaded.scheduler_config.max_num_seqs)
        has_experts, has_lm_head = self.loaded.model_config.experts is not None, self.loaded.model_config.has_lm_head
        if has_lm_head:
            self.loaded.runner.run_masks()
            for num_requests in sizes:
                for kind in (*_KINDS, *_ADJUSTED_KINDS):
                    self.generate([[0]] * num_requests, [kind] * num_requests)
            if self.loaded.speculative is not None:
                for num_requests in sizes:
                    self.generate([_DRAFTED_PROMPT] * num_requests, [_DRAFTED_KIND] * num_requests)
        longest, least = self.engine.scheduler.max_num_tokens - 2, 2 if has_lm_head else 1
        lens = (*_PROMPT_LENS, *(_EXPERTS_PROMPT_LENS if has_experts else ()))
        short = [size for size in _batch_sizes() if sizes[-1] < size < _WARM_UP_ROWS]  # tokens of no batch
        firsts = itertools.cycle(range(self.loaded.model_config.vocab_size))
        for num_requests in sizes_of_prompts:
            prompt = [0]
            for num_tokens in (*short, *lens) if num_requests == 1 else lens:
                # Of its own first token: what the prefix cache has of a prompt would be no token of the step
                prompt = [next(firsts)] + [0] * (min(max(num_tokens // num_requests, least), longest) - 1)
                self._run_prompts([prompt] * num_requests)
            self._run_prompts([prompt] * num_requests)  # from the prefix cache: rows that share their beginning

    def _run_prompts(self, prompts: list[list[int]]) -> None:
        if self.loaded.model_config.has_lm_head:
            self.generate(prompts, [_KINDS[0]] * len(prompts))
        else:
            self.embed(prompts, "last")

    def _test(self, params: list[SamplingParams], lora_indices: list[int]) -> None:
        generations = self.generate([[0]] * len(params), params, lora_indices=lora_indices)
        for generation, wanted in zip(generations, params, strict=True):
            if generation.error is not None:
                raise StartupError(f"The self-test failed: {generation.error.message}")
            if len(generation.token_ids) != min(wanted.max_tokens, self.engine.scheduler.max_num_tokens - 1):
                raise StartupError(f"The self-test gave {len(generation.token_ids)} of {wanted.max_tokens} tokens.")


def _batch_sizes() -> list[int]:
    """Return numbers of rows, ascending, that together launch every kernel that depends on them."""
    return sorted({size for power in range(12) for size in (2**power, 3 * 2**power // 2)})


def _rehearsed_sizes(max_num_seqs: int) -> tuple[list[int], list[int]]:
    """Return the numbers of rows of rehearsed batches, and those of prompts, which are fewer; both ascending.

    Both end with the largest batch: a kernel may be chosen by rows from a number on that is no other size.
    """
    sizes = _batch_sizes()
    smaller = [size for size in sizes if size < max_num_seqs]
    most = min(max_num_seqs, sizes[-1])
    return sorted({*smaller, most}), sorted({*smaller[::3], most})
