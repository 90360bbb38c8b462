"""Frozen configuration, made once by the launcher and handed down. Imports msgspec only; never torch.

Sections are separate so that no room sees more than it needs: EngineConfig goes to the engine process, ServerConfig
to the HTTP workers, LaunchConfig stays in the launcher. SchedulerConfig is derived inside the engine, once the size
of the KV pool is known. They cross process borders as JSON.
"""

import msgspec


class LoraSource(msgspec.Struct, frozen=True):
    """An adapter: what clients call it, and its folder."""

    name: str
    folder: str


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are guessed ahead (engine/core/speculative.py)."""

    method: str = "ngram"
    num_tokens: int = 4  # guessed at most per request and step
    ngram_min: int = 2  # tokens that must have stood in the request before
    ngram_max: int = 4  # the most that are compared, to choose among several places


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What to load and how much of the machine to use. None: decided from the model and the free memory."""

    model: str  # local folder in Hugging Face layout
    load_format: str = "auto"  # auto (safetensors) | dummy (random weights of the config's shapes)
    device: str = "auto"  # auto | cuda | mps | cpu
    tensor_parallel_size: int = 1  # devices that share the model, each with a process of its own
    dtype: str = "auto"  # auto | bfloat16 | float16 | float32
    quantization: str = (
        "auto"  # of the linear layers. auto: as the checkpoint is | none | a scheme of server/config/value_types.py
    )
    loras: list[LoraSource] = []  # adapters of the model; the first has lora_index 1
    attention_backend: str = "auto"
    max_model_len: int | None = None  # tokens
    max_num_seqs: int | None = None  # requests running at once
    max_num_batched_tokens: int | None = None  # tokens computed per step
    max_num_mixed_tokens: int | None = None  # the same while requests decode, which wait for the whole step
    is_offline: bool = False  # nobody waits for single tokens: prompts are computed in full steps also beside those
    block_size: int | None = None  # tokens per KV block
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str = "auto"  # auto (as dtype) | fp8, or fp8_e4m3 (float8_e4m3fn)
    gpu_memory_utilization: float = 0.9  # share of the device's memory the daemon may fill
    enable_prefix_caching: bool = True
    enforce_eager: bool = False  # no CUDA graphs: for debugging
    overlap_depth: int | None = None  # steps in flight: 2 overlaps host and device (default on cuda), 1 does not
    max_waiting: int = 2048  # requests queued before new ones are refused
    max_queued_tokens: int | None = None  # the same for their tokens
    speculative: SpeculativeConfig | None = None  # None: one token per request and step


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's world in numbers."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    # While requests decode (engine/core/scheduler.py): at least the first, at most the second of these. None: as the
    # second; as max_num_batched_tokens
    min_num_mixed_tokens: int | None = None
    max_num_mixed_tokens: int | None = None
    step_sizes: list[int] = []  # ascending: token numbers to which such steps are filled up, since they cost as much
    # The same in time, that of so many tokens without context; and the context that costs a token as much again as all
    # but attention. None: unknown
    max_mixed_cost: int | None = None
    costly_context: int | None = None
    max_model_len: int
    enable_prefix_caching: bool = True
    max_num_samples: int | None = None  # positions that a step with drafts samples at most; None: max_num_seqs


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an HTTP worker needs. Paths are absolute; sizes in bytes; times in seconds."""

    model: str  # the same folder as EngineConfig.model: tokenizer, template and generation defaults are read from it
    served_model_names: list[str]  # the first is the one answered with
    lora_names: list[str] = []  # of the adapters, in the order of EngineConfig.loras
    chat_template: str | None = None  # path of a Jinja file that replaces the model's own
    pooling: str = "auto"  # how embeddings are made: auto (as the folder says) | last | mean
    strict: bool = False  # unknown request fields are a 400 instead of being named in x-quire-ignored
    max_body_bytes: int = 8 * 1024 * 1024
    request_timeout_s: float | None = None  # deadline of every request
    engine_socket: str = ""  # unix socket of the engine
    control_socket: str = ""  # unix socket of the launcher
    worker_index: int = 0
    api_key_hashes: list[str] = []  # SHA-256, hex; none: nobody is asked for a key
    cors_origins: list[str] = []  # of pages that may call from a browser; "*": all
    root_path: str = ""  # prefix that a proxy puts before our paths
    otlp_traces_endpoint: str | None = None  # where a span per request is sent, OTLP over HTTP


class LaunchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher itself needs."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None  # path of a unix socket to listen on instead
    tls_cert: str | None = None  # PEM files, both or neither
    tls_key: str | None = None
    http_workers: int = 1
    drain_timeout_s: float = 25.0
    log_format: str = "auto"  # auto (bars on a terminal, key=value elsewhere) | text | json
    log_level: str = "info"
    debug: bool = False  # show tracebacks
    stall_timeout_s: float = 300.0  # an engine without progress for so long is restarted; 0: never
    api_key_file: str | None = None  # read again on SIGHUP
    given_key_hashes: list[str] = []  # of keys that are not in the file
    notices: list[str] = []  # sentences for the log, once it is there
    metrics_compat: str = "vllm"  # whose names /metrics has beside our own: vllm | none


class EngineProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that the process is told."""

    engine: EngineConfig
    engine_socket: str
    control_socket: str
    log_level: str = "info"
    log_format: str = "text"  # text | json
    debug: bool = False
