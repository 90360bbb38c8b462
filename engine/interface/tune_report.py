"""TuneAsk and TuneReport: the request of `quire doctor --tune` to engine/tune.py and its reply. Imports msgspec only.

Both are sent as JSON to and from a separate process, since the command itself never imports torch.
"""

import msgspec

from engine.interface.config import EngineConfig


class TuneAsk(msgspec.Struct, frozen=True, kw_only=True):
    """The request. A setting of `config` that is not its default is the user's and is not tuned."""

    config: EngineConfig
    limit_s: float  # of all measurements, loading included; the one that has begun is finished


class Rate(msgspec.Struct, frozen=True):
    """One measurement."""

    size: int  # tokens of a step, or requests at once
    tokens_per_s: float  # of prompts, or of answers in all


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of one dtype, each list ascending by size."""

    dtype: str
    prompts: list[Rate]
    answers: list[Rate]


class TuneReport(msgspec.Struct, frozen=True, kw_only=True):
    """The reply. `problem`: one sentence, if nothing could be measured; then the rest is empty."""

    device: str = ""
    measured: list[Measured] = []  # the first is of the dtype that a start chooses
    max_model_len: int = 0
    kv_cache_tokens: int = 0
    seconds: float = 0.0  # that it took
    is_complete: bool = True  # False: the time was over before all was measured
    problem: str | None = None
