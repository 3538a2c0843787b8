"""The one configuration tree: frozen, from TOML or flags, resolved once. The environment is read in this file only."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which checkpoint, and how it runs."""

    path: str  # a directory or a hub id
    revision: str | None = None  # of a hub id
    download: bool = False  # fetch a hub id that is not in the local cache
    served_names: tuple[str, ...] = ()  # names the API answers to; () means the last part of `path`
    dtype: str = "auto"  # auto: bfloat16 on a GPU, float32 on a CPU
    device: str = "auto"  # auto, cpu, cuda
    max_length: int | None = None  # tokens; None: the checkpoint's, or what the cache can hold if that is less
    seed: int = 0  # seeds of requests without one are drawn from this
    threads: int | None = None  # CPU threads of the model; None: all cores


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How many ranks, and what they share."""

    tp: int = 1


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """State kept between steps."""

    memory_bytes: int | None = None  # None: chosen from the device and printed
    prefix: bool = True  # reuse of state between requests
    keep_every: int = 1024  # tokens between boundaries a later request may resume from; a multiple of 64


@dataclass(frozen=True, kw_only=True)
class SchedConfig:
    """What one step may hold and how many may wait."""

    rows: int = 64  # sequences that run at once
    step_tokens: int = 2048  # tokens of one step over all sequences
    chunk: int = 1024  # tokens of one sequence in one step, so that a long prompt does not stall decoding
    waiting: int = 1024  # sequences that may wait; one more is answered 429


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The HTTP side."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    root_path: str = ""
    default_effort: float = 0.9  # thinking effort stated in a prompt that names none
    prime_model_role: bool = False  # end prompts with the model's role token, as vLLM does
    tool_declare_position: str = "first"  # first, after-system
    max_logprobs: int = 20
    body_bytes: int = 64 << 20
    drain_seconds: float = 30.0
    log_level: str = "info"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything a run is made of."""

    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    sched: SchedConfig = field(default_factory=SchedConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    ops: dict[str, str] = field(default_factory=dict)  # op name -> implementation, to replace one for a bisect
