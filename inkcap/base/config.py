"""The one configuration tree: frozen, from TOML or flags, resolved once. The environment is read in this file only."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from inkcap.base.errors import ConfigInvalid
from inkcap.base.formats import Numerics


def option(default: object, meaning: str, *, flag: str | None = None, check: str | None = None, unit: str = "") -> Any:
    """A field of the tree. `flag` replaces the flag made of the field's name; `check` names a rule of `RULES`."""
    metadata = {"help": meaning, "flag": flag, "check": check, "unit": unit}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "positive": (lambda v: v is None or v >= 1, "1 or more"),
    "not negative": (lambda v: v >= 0, "0 or more"),
    "port": (lambda v: 0 <= v <= 65535, "0 to 65535 (0: any free port)"),
    "effort": (lambda v: 0 <= v <= 1, "0 to 1"),
    "fraction": (lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "grains": (lambda v: v >= 64 and v % 64 == 0, "a multiple of 64, 64 or more"),
    "dtype": (lambda v: v in ("auto", "bfloat16", "float32"), "auto, bfloat16 or float32"),
    "cache dtype": (lambda v: v in ("auto", "bf16", "fp8", "fp8_e4m3"), "auto, bf16, fp8 or fp8_e4m3"),
    "numerics": (lambda v: v in list(Numerics), " or ".join(Numerics)),
    "device": (lambda v: v in ("auto", "cpu", "cuda"), "auto, cpu or cuda"),
    "position": (lambda v: v in ("first", "after-system"), "first or after-system"),
    "log format": (lambda v: v in ("text", "json"), "text or json"),
    "tls check": (lambda v: v in (0, 1, 2), "0 (none), 1 (optional) or 2 (required)"),
    "level": (lambda v: v in ("debug", "info", "warning", "error"), "debug, info, warning or error"),
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which checkpoint, and how it runs."""

    path: str  # a directory or a hub id
    revision: str | None = option(None, "revision of a hub id")
    download: bool = option(False, "fetch a hub id that is not in the local cache")
    served_names: tuple[str, ...] = option((), "names the API answers to", flag="--served-model-name")
    dtype: str = option("auto", "auto: bfloat16 on a GPU, float32 on a CPU", check="dtype")
    numerics: str = option(
        "w4a16",
        "of quantised experts: w4a16 (activations as they are) or reference (activations quantised as the publishers' "
        "kernels do it, emulated, slower)",
        check="numerics",
    )
    device: str = option("auto", "auto: a GPU where there is one", check="device")
    max_length: int | None = option(
        None, "tokens of prompt and answer together", flag="--max-model-len", check="positive", unit="tokens"
    )
    seed: int = option(0, "seeds of requests without one are drawn from this", check="not negative")
    threads: int | None = option(None, "CPU threads of the model; default all cores", check="positive")
    graphs: bool = option(True, "on a GPU, capture decode steps once and replay them", flag="--cuda-graphs")
    deterministic: bool = option(
        False,
        "the same bits for a request in any company and any chunks, at a cost; else the last bits depend on how many "
        "tokens a step has, how long its longest row is, and what is captured",
    )
    mixed_graphs: bool = option(True, "capture small steps with prompts in them too", flag="--mixed-cuda-graphs")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How many ranks, and what they share."""

    tp: int = option(1, "ranks that share each layer", flag="--tensor-parallel-size", check="positive")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """State kept between steps."""

    memory_bytes: int | None = option(
        None,
        "memory of the cache, like 4GiB; default chosen and printed",
        flag="--cache-memory",
        check="positive",
        unit="bytes",
    )
    gpu_memory_bytes: int | None = option(
        None,
        "memory of a GPU for weights, steps and cache together; default by --gpu-memory-utilization",
        flag="--gpu-memory",
        check="positive",
        unit="bytes",
    )
    gpu_utilization: float = option(
        0.9, "part of a GPU's memory for all of this", flag="--gpu-memory-utilization", check="fraction"
    )
    dtype: str = option(
        "auto",
        "of keys and values: auto (the model's), bf16, or fp8, also fp8_e4m3 (half the memory; one scale a head, made "
        "at start so that nothing can saturate)",
        flag="--kv-cache-dtype",
        check="cache dtype",
    )
    scales: str | None = option(
        None,
        "JSON file with scales of an fp8 cache, by name (layers.0.attention.v_scale: a number, or one a kv head), in "
        "place of those made of the weights; larger numbers than 448 times a scale saturate",
        flag="--kv-cache-scales",
    )
    prefix: bool = option(True, "reuse state between requests", flag="--prefix-caching")
    keep_every: int = option(
        1024, "distance between the boundaries a later request may resume from", check="grains", unit="tokens"
    )


@dataclass(frozen=True, kw_only=True)
class SchedConfig:
    """What one step may hold and how many may wait."""

    rows: int = option(64, "sequences that run at once", flag="--max-num-seqs", check="positive")
    step_tokens: int = option(
        0,
        "tokens of one step over all sequences; 0: 2,048 on a CPU, 8,192 on a GPU",
        flag="--max-num-batched-tokens",
        check="not negative",
        unit="tokens",
    )
    chunk: int = option(
        0,
        "tokens of one sequence in one step; 0: 1,024 on a CPU, all of a step on a GPU",
        check="not negative",
        unit="tokens",
    )
    waiting: int = option(
        1024, "sequences that may wait; one more is answered 429", flag="--max-waiting", check="not negative"
    )

    def on(self, device: str) -> "SchedConfig":
        """With what it leaves to the device, cpu or cuda, filled in. A GPU reads its weights once for all of a step."""
        tokens = self.step_tokens or {"cpu": 2048, "cuda": 8192}[device]
        return replace(self, step_tokens=tokens, chunk=self.chunk or min(tokens, {"cpu": 1024, "cuda": tokens}[device]))


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The HTTP side."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on", check="port")
    api_key: str | None = option(None, "key that /v1 asks for; also INKCAP_API_KEY")
    cors_origins: tuple[str, ...] = option((), "origins that browsers may call from", flag="--cors-origin")
    root_path: str = option("", "path prefix a proxy strips")
    default_effort: float = option(0.9, "thinking effort stated in a prompt that names none", check="effort")
    prime_model_role: bool = option(False, "end prompts with the model's role token, as vLLM does")
    tool_declare_position: str = option("first", "place of tool declarations: first or after-system", check="position")
    replay_hidden_reasoning: bool = option(
        False, "give the model its earlier thinking back where a client left it out of the conversation"
    )
    max_logprobs: int = option(20, "alternatives per token a request may ask for", check="not negative")
    body_bytes: int = option(16 << 20, "largest request body", flag="--max-body", check="positive", unit="bytes")
    drain_seconds: float = option(30.0, "time that running requests get on SIGTERM", check="not negative")
    stored_responses: int = option(1000, "responses of /v1/responses kept for later requests", check="not negative")
    generation_config: str = option(
        "auto", "sampling defaults: auto (of the checkpoint), vllm (none), or a folder with generation_config.json"
    )
    generation_override: str = option("", "sampling defaults, as JSON", flag="--override-generation-config")
    tokenizer_info: bool = option(False, "answer /tokenizer_info", flag="--enable-tokenizer-info-endpoint")
    docs: bool = option(True, "answer /docs and /openapi.json")
    header_bytes: int = option(65536, "largest request line and headers", check="positive", unit="bytes")
    header_count: int = option(100, "most headers of a request", check="positive")
    json_depth: int = option(128, "deepest nesting of a body's JSON", check="positive")
    ssl_keyfile: str | None = option(None, "TLS key; with --ssl-certfile the server speaks https")
    ssl_certfile: str | None = option(None, "TLS certificate")
    ssl_ca_certs: str | None = option(None, "certificates that clients' own are checked with")
    ssl_cert_reqs: int = option(0, "whether clients need a certificate: 0, 1 (optional) or 2", check="tls check")
    ssl_ciphers: str | None = option(None, "TLS ciphers")
    trace_endpoint: str | None = option(
        None, "send OpenTelemetry traces of requests to this OTLP/HTTP address", flag="--otlp-traces-endpoint"
    )
    log_level: str = option("info", "debug, info, warning or error", check="level")
    web_log_level: str = option("warning", "the same, of the HTTP library", flag="--uvicorn-log-level", check="level")
    log_format: str = option("text", "text, or json: one object a line", check="log format")
    log_stats: bool = option(True, "a line about load every ten seconds while there is any")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything a run is made of. Sections are checked together by `checked`."""

    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    sched: SchedConfig = field(default_factory=SchedConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    ops: dict[str, str] = field(default_factory=dict)  # op name -> implementation, to replace one for a bisect


@dataclass(frozen=True)
class Choice:
    """One automatic choice, printed at start."""

    name: str
    value: object
    reason: str

    def __str__(self) -> str:
        return f"{self.name} = {self.value} ({self.reason})"


def environment_defaults() -> dict[str, dict[str, object]]:
    """Values the environment gives, by section and field. Flags and files override them.

    INKCAP_API_KEY: server.api_key. INKCAP_OPS: `name=implementation`, comma separated.
    """
    found: dict[str, dict[str, object]] = {}
    if key := os.environ.get("INKCAP_API_KEY"):
        found["server"] = {"api_key": key}
    if ops := os.environ.get("INKCAP_OPS"):
        pairs = [item.partition("=") for item in ops.split(",")]
        if bad := [name for name, sign, value in pairs if not (name and sign and value)]:
            raise ConfigInvalid(f"INKCAP_OPS has {bad[0]!r}; write name=implementation, comma separated")
        found["ops"] = {name: value for name, _, value in pairs}
    return found


def hub_cache() -> Path:
    """Where the hub keeps downloaded checkpoints: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".cache" / "huggingface") / "hub"


def engine_environment() -> dict[str, str]:
    """The environment for a process that runs a model.

    OpenMP's threads wait asleep: spinning, as they do by default, they take the cores from the server beside them, and
    a step on a busy machine of two cores took 10 times as long (docs/log.md). The user's own setting wins.
    """
    return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
