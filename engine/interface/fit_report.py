"""Ask and Diagnosis: the request of `quire doctor` to engine/startup/fit.py and its reply. Imports msgspec only.

Both are sent as JSON to and from a separate process, since the command itself never imports torch. Sizes are in bytes.
"""

import msgspec


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """The request: which model to examine, on which GPUs.

    None: folder: examine only the machine; gpu_memory: use this machine's GPUs; max_model_len: the model's maximum.
    """

    folder: str | None = None  # model folder; config.json is enough
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str = "auto"
    model_impl: str = "auto"
    device: str = "auto"
    gpu_memory: int | None = None  # memory of a hypothetical GPU
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_decode_step_tokens: int | None = None
    block_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    num_gpus: int = 1  # number of GPUs that share the model
    is_expert_parallel: bool = False
    is_alone: bool = False  # plan for all memory of the device, also for what other programs hold of it now


class Gpu(msgspec.Struct, frozen=True):
    """One GPU of this machine."""

    name: str
    total: int
    free: int
    capability: str


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The versions of the installed software, and the GPUs. None: not installed."""

    torch: str
    cuda: str | None  # the version that torch was built with
    triton: str | None
    driver: str | None  # NVIDIA driver
    flash_attn: str | None
    transformers: str | None
    why_no_cuda: str | None
    gpus: list[Gpu]
    host_memory: int = 0  # that quire serve takes behind the KV cache, unless a flag says otherwise


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """The weights in a folder, counted from the headers of its safetensors files."""

    num_parameters: int
    num_bytes: int
    dtypes: list[str]  # the one with the most bytes first


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """The split of a device's memory between model and requests. With several GPUs: of each."""

    device: str  # display name
    total: int
    usable: int
    step: int  # working memory of a step
    kv_cache: int
    kv_cache_tokens: int
    max_model_len: int
    max_num_seqs: int
    num_requests: dict[int, int]  # tokens per request → requests of this length that run at once
    kv_cache_alone: int | None = None  # if no other program held memory of the device; None: on a CPU


class LayersReport(msgspec.Struct, frozen=True, kw_only=True):
    """The cache of the layers of one kind. With several GPUs: of each. A layer may have attention and a state."""

    kind: str  # full | window | state
    num_layers: int  # with keys and values, or a state, of their own
    bytes_per_token: int  # 0: a state
    window: int | None  # the tokens that are kept; None: all of a request
    bytes_per_request: int | None  # at most; of a state: of each request; None: as many as its tokens need


class ModelReport(msgspec.Struct, kw_only=True):
    """The report on a model. If there is a `problem`, the fields that could not be determined are None."""

    architecture: str
    is_supported: bool = True  # the architecture is supported
    computed_by: str | None = None  # transformers' own class, and what is lost by it; None: Quire's own layers
    text_of: str | None = None  # the model of pictures or sounds of which the text part alone is served
    problem: str | None = None  # one sentence: the reason why the model cannot be served
    quantization: str | None = None  # display name
    stored: Stored | None = None  # None: no weights in the folder
    num_parameters: int | None = None
    checkpoint_dtype: str | None = None
    checkpoint_bytes: int | None = None  # approximate size of its weight files, present or not
    dtype: str | None = None  # dtype that the engine would compute with
    has_lm_head: bool | None = None
    weights: int | None = None  # bytes; with several GPUs: on each, as kv_bytes_per_token
    kv_bytes_per_token: int | None = None  # in all layers
    kv_layers: list[LayersReport] = []  # by kind
    max_context_len: int | None = None  # tokens, by its position embeddings
    room: Room | None = None


class Diagnosis(msgspec.Struct, kw_only=True):
    """The reply: the machine and, if requested, the model."""

    machine: Machine
    model: ModelReport | None = None
