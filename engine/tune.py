"""The engine's part of `quire doctor --tune`: measures a model at several sizes of steps and batches. Imports torch.

    python -m engine.tune < ask.json > report.json        (engine/interface/tune_report.py)
Each size runs in the engine's own loop: prompts of random tokens that one step takes whole, and answers of as many
requests at once. Progress is written to standard error, one line for each measurement.
"""

import random
import sys
import time
from collections.abc import Callable, Iterable

import msgspec

from engine.interface.config import EngineConfig
from engine.interface.errors import StartupError
from engine.interface.protocol import SamplingParams
from engine.interface.tune_report import Measured, Rate, TuneAsk, TuneReport
from engine.offline import OfflineEngine

_STEP_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192)
_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_MOST_ON_CPU = (256, 2048)  # requests and tokens of a step that are tried there; elsewhere those of a start
_PROMPT_TOKENS, _ANSWER_TOKENS = 16, 16
_RUNS = 2  # of which the best counts
_PAST_THE_BEST = 0.8  # a size with less than this share of the best rate is the last one
_OTHER_DTYPE = {"bfloat16": "float32", "float32": "bfloat16"}

Clock = Callable[[], float]


def tune(ask: TuneAsk, *, clock: Clock = time.monotonic) -> TuneReport:
    """Measure within the limit of time; the smallest sizes come first. Blocks."""
    begun_s = clock()
    end_s = begun_s + ask.limit_s
    try:
        tuner = _Tuner(_widened(ask.config), end_s=end_s, clock=clock)
        measured = [tuner.measure()]
        device, plan = tuner.device, tuner.offline.loaded.plan
        tuner.close()
        # on a CPU either dtype may be faster; a GPU's 16-bit one always is
        if device == "cpu" and ask.config.dtype == "auto" and clock() < end_s - (clock() - begun_s):
            config = msgspec.structs.replace(ask.config, dtype=_OTHER_DTYPE[measured[0].dtype])
            other = _Tuner(_widened(config), end_s=end_s, clock=clock)
            measured.append(other.measure())
            other.close()
    except StartupError as error:
        return TuneReport(problem=error.message)
    return TuneReport(
        device=device,
        measured=measured,
        max_model_len=plan.max_model_len,
        kv_cache_tokens=plan.num_tokens,
        seconds=clock() - begun_s,
        is_complete=clock() < end_s,
    )


class _Tuner:
    """One loaded model. Life: loaded → measure → close."""

    def __init__(self, config: EngineConfig, *, end_s: float, clock: Clock) -> None:
        self.offline = OfflineEngine.load(config)
        loaded = self.offline.loaded
        if not loaded.model_config.has_lm_head:
            raise StartupError("This model makes embeddings alone, for which nothing is tuned.")
        self.device = loaded.runner.device.type
        self._dtype = str(loaded.dtype).removeprefix("torch.")
        self._limits = loaded.scheduler_config
        self._vocab_size = loaded.model_config.vocab_size
        self._end_s, self._clock = end_s, clock
        self._random = random.Random(0)

    def measure(self) -> Measured:
        """Return the rates of all sizes for which there is time."""
        limits = self._limits
        room = self.offline.loaded.plan.num_tokens
        steps = [size for size in _STEP_TOKENS if size <= min(limits.max_num_batched_tokens, room)]
        each = _PROMPT_TOKENS + _ANSWER_TOKENS
        requests = [size for size in _REQUESTS if size <= min(limits.max_num_seqs, room // each)]
        self._time([self._prompt(8)] * 2, 2)  # what the first steps alone do
        answers = self._rates("at once", requests, self._answers_per_s)
        prompts = self._rates("tokens a step", steps, self._prompts_per_s)
        return Measured(dtype=self._dtype, prompts=prompts, answers=answers)

    def close(self) -> None:
        """Release the model's memory."""
        self.offline.loaded.close()

    def _rates(self, what: str, sizes: Iterable[int], measure: Callable[[int], float]) -> list[Rate]:
        rates: list[Rate] = []
        for size in sizes:
            if rates and self._clock() >= self._end_s:
                break
            rates.append(Rate(size, max(measure(size) for _ in range(_RUNS))))
            print(f"{self._dtype}, {size} {what}: {rates[-1].tokens_per_s:,.0f} tok/s", file=sys.stderr, flush=True)
            if rates[-1].tokens_per_s < _PAST_THE_BEST * max(rate.tokens_per_s for rate in rates):
                break
        return rates

    def _prompts_per_s(self, num_tokens: int) -> float:
        """Compute a step's worth of prompts, each within the context; return prompt tokens per second."""
        longest = self._limits.max_model_len - 1
        lens = [min(longest, num_tokens - begin) for begin in range(0, num_tokens, longest)]
        prompts = [self._prompt(length) for length in lens[: self._limits.max_num_seqs]]
        return sum(map(len, prompts)) / self._time(prompts, 1)

    def _answers_per_s(self, num_requests: int) -> float:
        """Answer short prompts at once; return answer tokens per second, without the first ones."""
        prompts = [self._prompt(_PROMPT_TOKENS) for _ in range(num_requests)]
        first_s = self._time(prompts, 1)
        prompts = [self._prompt(_PROMPT_TOKENS) for _ in range(num_requests)]
        all_s = self._time(prompts, 1 + _ANSWER_TOKENS)
        return num_requests * _ANSWER_TOKENS / max(all_s - first_s, 1e-6)

    def _time(self, prompts: list[list[int]], num_tokens: int) -> float:
        params = [SamplingParams(max_tokens=num_tokens, temperature=0.0)] * len(prompts)
        begun_s = time.perf_counter()
        for result in self.offline.generate(prompts, params):
            if result.error is not None:
                raise StartupError(f"A measurement failed: {result.error.message}")
        return time.perf_counter() - begun_s

    def _prompt(self, length: int) -> list[int]:
        """Return random tokens: nothing of them is in the prefix cache."""
        return [self._random.randrange(self._vocab_size) for _ in range(max(length, 1))]


def _widened(config: EngineConfig) -> EngineConfig:
    """Return the configuration of the measurements: whole steps, no drafts, on a CPU up to larger sizes than usual."""
    config = msgspec.structs.replace(config, is_offline=True, speculative=None, enable_prefix_caching=False)
    if config.device == "cpu" or (config.device == "auto" and _is_on_cpu()):
        seqs, tokens = _MOST_ON_CPU
        config = msgspec.structs.replace(
            config,
            max_num_seqs=config.max_num_seqs or min(seqs, config.max_num_batched_tokens or seqs),
            max_num_batched_tokens=config.max_num_batched_tokens or max(tokens, config.max_num_seqs or 1),
        )
    return config


def _is_on_cpu() -> bool:
    from engine.startup.device_choice import resolve_device

    return resolve_device("auto").type == "cpu"


def main() -> int:
    """Entry point of `python -m engine.tune`."""
    ask = msgspec.json.decode(sys.stdin.buffer.read(), type=TuneAsk)
    sys.stdout.buffer.write(msgspec.json.encode(tune(ask)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
