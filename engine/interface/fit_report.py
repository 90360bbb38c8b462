"""What `quire doctor` asks of engine/startup/fit.py, and what it hears. Imports msgspec only; never torch.

They cross a process border as JSON, since the command itself never imports torch. Sizes are in bytes.
"""

import msgspec


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What to look at. None: the machine alone; what this machine has; what the model reaches."""

    folder: str | None = None  # of the model; config.json is enough
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str = "auto"
    device: str = "auto"
    gpu_memory: int | None = None  # of a GPU that need not be here
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    num_gpus: int = 1  # over which the model is split


class Gpu(msgspec.Struct, frozen=True):
    """One GPU of this machine."""

    name: str
    total: int
    free: int
    capability: str


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The software and the GPUs that the engine finds. None: there is none."""

    torch: str
    cuda: str | None  # that torch was built with
    triton: str | None
    driver: str | None  # NVIDIA's
    flash_attn: str | None
    transformers: str | None
    why_no_cuda: str | None
    gpus: list[Gpu]


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """The weights in a folder, by the headers of its safetensors files."""

    num_parameters: int
    num_bytes: int
    dtypes: list[str]  # the one with the most bytes first


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """How a model and its requests share a device; of one GPU where it is split over several."""

    device: str  # for people
    total: int
    usable: int
    step: int  # to compute a step
    kv_cache: int
    kv_cache_tokens: int
    max_model_len: int
    max_num_seqs: int
    num_requests: dict[int, int]  # tokens of a request → how many such are served at once


class ModelReport(msgspec.Struct, kw_only=True):
    """What is known of a model. What comes after `problem` is None as far as that stands in the way."""

    architecture: str
    is_supported: bool = True  # the architecture is
    problem: str | None = None  # one sentence: why it cannot be served
    quantization: str | None = None  # for people
    stored: Stored | None = None  # None: no weights in the folder
    num_parameters: int | None = None
    checkpoint_dtype: str | None = None
    checkpoint_bytes: int | None = None  # about what its files take, whether they are here or not
    dtype: str | None = None  # in which it would be served
    has_lm_head: bool | None = None
    weights: int | None = None  # of one GPU where it is split over several, as kv_bytes_per_token
    kv_bytes_per_token: int | None = None
    max_context_len: int | None = None  # tokens that its positions reach
    room: Room | None = None


class Diagnosis(msgspec.Struct, kw_only=True):
    """The whole answer."""

    machine: Machine
    model: ModelReport | None = None
