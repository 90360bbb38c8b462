"""Frozen configuration classes of all processes. Imports msgspec and engine.interface.tenant; never torch.

The launcher creates them once and sends them to its children as JSON. Each process gets only what it needs:
EngineConfig goes to the engine process, ServerConfig to the HTTP workers, LaunchConfig stays in the launcher.
The engine derives SchedulerConfig itself, once the size of the KV pool is known.
"""

from typing import Annotated, Literal

import msgspec

from engine.interface.tenant import Tenant


class LoraSource(msgspec.Struct, frozen=True):
    """A LoRA adapter: its name in the API and its folder."""

    name: str
    folder: str


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of speculative decoding (engine/core/speculative.py)."""

    method: str = "ngram"
    num_tokens: int = 4  # maximum number of draft tokens per request and step
    ngram_min: int = 2  # tokens that must occur earlier in the request
    ngram_max: int = 4  # maximum number of compared tokens, to choose among several occurrences


_Count = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
_Endpoint = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Events of the prefix cache for routers (engine/kv_publisher.py). The fields are vLLM's, but for the last."""

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] = "zmq"
    endpoint: _Endpoint = "tcp://*:5557"  # of the PUB socket
    replay_endpoint: _Endpoint | None = None  # of the ROUTER socket that sends earlier batches again; None: none
    buffer_steps: _Count = 10_000  # batches kept for it
    hwm: _Count = 100_000  # batches that ZeroMQ keeps for a slow subscriber; more are dropped
    max_queue_size: _Count = 100_000  # batches that wait to be sent
    topic: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    event_format: Literal["array", "map"] = "array"  # of an event in a batch


class PrefillHost(msgspec.Struct, frozen=True):
    """Another host with prefill engines, where its daemon listens (server/launcher/host_links.py)."""

    host: str
    port: int
    num_engines: int = 1

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PeerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an engine among prefill and decode engines (docs/explanation/disaggregation.md)."""

    role: Literal["prefill", "decode"]
    index: int  # among the engines of its role
    num_prefill: int  # engines of each role on this host; one of both may be 0
    num_decode: int
    prefill_sockets: list[str] = []  # unix sockets on which prefill engines listen for decode engines, by their numbers
    prefill_hosts: list[PrefillHost] = []  # whose engines follow those of this host
    is_on_several_hosts: bool = False  # paths and times of files mean nothing to the other side
    first_decode: int = 0  # number of decode-0 among the decode engines of all servers that share a prefill engine
    transport: str = "shared-memory"  # how blocks are copied: shared-memory | nixl

    @property
    def num_engines(self) -> int:
        """Engines of both roles on this host."""
        return self.num_prefill + self.num_decode

    @property
    def name(self) -> str:
        """What /health and the log call it: "prefill-0"."""
        return f"{self.role}-{self.index}"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's settings: model, device and limits. None: the engine chooses by model and free memory."""

    model: str  # local folder in Hugging Face layout
    model_impl: str = "auto"  # auto (Quire's own, else transformers') | quire | transformers: who computes the model
    load_format: str = "auto"  # auto (safetensors) | dummy (random weights with the config's shapes)
    device: str = "auto"  # auto | cuda | mps | cpu
    tensor_parallel_size: int = 1  # devices that share the model, with one process each
    is_expert_parallel: bool = False  # each of them has some experts whole, instead of a part of every expert
    dtype: str = "auto"  # auto | bfloat16 | float16 | float32
    quantization: str = "auto"  # auto: as in the checkpoint | none | a scheme of server/config/value_types.py
    loras: list[LoraSource] = []  # LoRA adapters; the first has lora_index 1
    attention_backend: str = "auto"
    max_model_len: int | None = None  # tokens
    max_num_seqs: int | None = None  # requests running at once
    max_num_batched_tokens: int | None = None  # tokens computed per step
    max_decode_step_tokens: int | None = None  # tokens per step that also has decode rows: they wait for all of it
    is_offline: bool = False  # no client waits for single tokens: steps with decode rows may have full size, too
    block_size: int | None = None  # tokens per KV block
    kv_cache_memory_bytes: int | None = None
    kv_host_memory_bytes: int | None = None  # host memory behind the KV pool, for all ranks together; None: off
    chooses_host_memory: bool = False  # the engine sizes it, if kv_host_memory_bytes is None
    kv_disk: str | None = None  # folder of blocks behind host memory
    kv_disk_bytes: int | None = None  # their most; None: 64 GiB
    kv_events: KvEventsConfig | None = None  # None: the changes of the prefix cache are not published
    kv_cache_dtype: str = "auto"  # auto (as dtype) | fp8, or fp8_e4m3 (float8_e4m3fn) | int8
    gpu_memory_utilization: float = 0.9  # share of the device's memory that the daemon may use
    enable_prefix_caching: bool = True
    groups_rows: bool = True  # where it pays, decode attention reads a prefix that rows share once for all of them
    pin_share: float = 0.25  # of the KV pool, what the pinned prompts of one API key may take
    enforce_eager: bool = False  # no CUDA graphs: for debugging
    overlap_depth: int | None = None  # steps in flight: 2 overlaps host and device (default on cuda), 1 does not
    max_queued_requests: int = 2048  # queued requests at which new ones are refused
    max_queued_tokens: int | None = None  # queued prompt tokens at which new requests are refused
    max_queue_wait_s: float | None = 30.0  # predicted time to the first token at which new requests are refused
    speculative: SpeculativeConfig | None = None  # None: one token per request and step
    peer: PeerConfig | None = None  # None: it computes prompts and answers alone


class CacheGroup(msgspec.Struct, frozen=True):
    """The layers of a model whose caches live alike (docs/explanation/kv-cache.md).

    A block is block_tokens tokens of the group, or one request's state of it. It takes pages_per_block pages.
    """

    kind: Literal["full", "window", "state"]
    block_tokens: int  # a multiple of SchedulerConfig.block_size; of a state: of where it may be saved
    pages_per_block: int = 1
    # Of kind "window" alone, one of them: the tokens that a token sees, itself included; or the length of the chunks of
    # positions, of which a token sees its own
    window: int | None = None
    chunk: int | None = None

    @property
    def num_tables(self) -> int:
        """The number of tables in which a plan lists its pages.

        Page i of block b is at column b of table i. A state is one block: its pages are the columns of one table.
        """
        return 1 if self.kind == "state" else self.pages_per_block


class SharingRates(msgspec.Struct, frozen=True, kw_only=True):
    """The costs of grouping decode rows that share a prefix, in keys: the time to read that many keys of one row.

    engine/startup/limits.py has the measured rates from which they follow.
    """

    chunk_tokens: int = 256  # rows are compared by so many tokens
    key_us: float = 1.0  # to read a key and its value in all layers whose rows are grouped
    step_keys: int = 0  # of a step with groups
    group_keys: int = 0  # of a group
    row_keys: int = 0  # of a row in a group
    shared_percent: int = 0  # of a shared key for each row: the products, which are not spared


class HostTierConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory behind the KV pool (engine/core/host_tier.py)."""

    num_slots: int  # pages that it has room for
    # Pages that a step copies in each direction (engine/core/copy_costs.py), or those of one block if these are more
    max_copies: int  # at least so many, unless decode rows wait for the step
    max_copies_beside: int | None = None  # beside decode rows; None: max_copies
    copies_per_token: float = 0.0  # for each prompt token of the step
    # Of the time beside decode rows, what copies to the host take for which nobody waits; None: as much as others
    unasked_share: float | None = None
    # Of blocks that nobody waits for, those that leave the pool soon are copied (engine/core/leaving_blocks.py), and no
    # others. False: all, once they are published, as a disk and other engines need them
    copies_leaving: bool = False
    page_s: float = 0.0  # seconds to copy a page from the host
    token_s: float = 0.0  # seconds to compute a prompt token; 0: unknown


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's limits, derived from EngineConfig and the size of the KV pool."""

    num_pages: int  # of the pool, page 0 for padding included
    block_size: int  # tokens of a kernel's block, and of a link in the chain of hashes
    groups: tuple[CacheGroup, ...] = ()  # (): one full group, whose blocks are pages of block_size tokens
    max_num_seqs: int
    max_num_batched_tokens: int
    # Bounds of the tokens of a step with decode rows (engine/core/scheduler.py). None: min equals max; max equals
    # max_num_batched_tokens
    min_decode_step_tokens: int | None = None
    max_decode_step_tokens: int | None = None
    step_sizes: list[int] = []  # ascending: token counts to which such steps are filled up, since padding costs as much
    # Maximum time of such a step, given as the number of tokens without context that take this time; and the context
    # length at which attention costs a token as much as everything else. None: unknown
    max_mixed_cost: int | None = None
    costly_context: int | None = None
    max_model_len: int
    enable_prefix_caching: bool = True
    max_num_samples: int | None = None  # maximum sampled positions of a step with drafts; None: max_num_seqs
    sharing: SharingRates | None = None  # None: rows are not grouped by shared prefixes
    host_tier: HostTierConfig | None = None  # None: blocks that are evicted from the pool are lost
    pin_share: float = 0.25  # of the pool, what the pinned prompts of one API key may take

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The groups, also if none are named. Tables of a plan are numbered group after group."""
        return self.groups or (CacheGroup("full", self.block_size),)


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of an HTTP worker. Paths are absolute; sizes in bytes; times in seconds."""

    model: str  # as EngineConfig.model; has the tokenizer, the chat template and the generation defaults
    served_model_names: list[str]  # responses contain the first
    lora_names: list[str] = []  # adapter names, in the order of EngineConfig.loras
    chat_template: str | None = None  # path of a Jinja file that replaces the model's chat template
    pooling: str = "auto"  # pooling of embeddings: auto (from the model folder) | last | mean
    strict: bool = False  # unknown request fields: True: status 400; False: listed in x-quire-ignored
    max_body_bytes: int = 8 * 1024 * 1024
    request_timeout_s: float | None = None  # deadline of every request
    max_replays: int = 2  # further engines in a row to which open requests go on without a further token; 0: none
    engine_socket: str = ""  # unix socket of the engine; with several engines, of the first that decodes
    prefill_sockets: list[str] = []  # unix sockets of the engines that compute long prompts for others
    decode_sockets: list[str] = []  # then: those of the engines that decode
    engine_names: list[str] = []  # of both, in this order
    num_remote: int = 0  # the last of prefill_sockets, which lead to other hosts
    first_decode: int = 0  # as PeerConfig.first_decode
    min_prefill_tokens: int = 256  # of a prompt that is computed by one of the first
    control_socket: str = ""  # unix socket of the launcher
    worker_index: int = 0
    api_key_hashes: list[str] = []  # SHA-256, hex; empty: no key is required
    api_key_roles: dict[str, list[str]] = {}  # by hash; a key that is not here has the default roles
    api_key_tenants: dict[str, Tenant] = {}  # by hash; a key that is not here has no name and no limits
    priority: str | None = (
        None  # requests that may set `priority`: off | keys | all; None: all, or off with several keys
    )
    allowed_hosts: list[str] | None = None  # of Host and Origin, besides loopback ones; None: they are not checked
    cors_origins: list[str] = []  # web pages that may call the API from a browser; "*": all
    root_path: str = ""  # path prefix that a proxy adds
    otlp_traces_endpoint: str | None = None  # URL that receives one span per request, OTLP over HTTP


class HostLinksConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a daemon is connected to those of other hosts: files for TLS, and where it lends prefill engines."""

    cert: str  # PEM files
    key: str
    ca: str  # certificates that sign those of the other hosts
    listen: PrefillHost | None = None  # None: it lends none


class LaunchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the launcher itself."""

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
    has_standby: bool = False  # keep a second engine process that takes over when the engine ends
    stall_timeout_s: float = 300.0  # an engine without progress for this time is restarted; 0: never
    api_key_file: str | None = None  # read again on SIGHUP
    given_key_hashes: list[str] = []  # SHA-256 of keys that are not in the file
    notices: list[str] = []  # sentences to log once logging is configured
    metrics_compat: str = "vllm"  # additional metric names in /metrics: vllm | none
    host_links: HostLinksConfig | None = None  # None: all engines are on this host


class EngineProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration file of the engine process."""

    engine: EngineConfig
    index: int = 0  # among the daemon's engines
    engine_socket: str
    control_socket: str
    log_level: str = "info"
    log_format: str = "text"  # text | json
    debug: bool = False
    is_standby: bool = False  # it waits for Activate, loaded as far as the engine leaves room
    is_held: bool = False  # a standby that loads nothing before: another daemon's engine has the memory
