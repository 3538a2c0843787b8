"""Numbers for Prometheus, as text of its format 0.0.4. Names and labels are those clients of vLLM scrape.

A histogram costs one bisection per observation, so that one per token can be afforded.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from inkcap.base.request import STEP_BOUNDS, EngineInfo, EngineStats

SECONDS = (1, 2.5, 5, 7.5, 10, 20, 40, 80)
FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, *SECONDS, 160, 640, 2560)
TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, *SECONDS)
REQUEST_BUCKETS = (
    (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
)  # fmt: skip
HTTP_BUCKETS = (0.1, 0.5, 1)
COUNT_BUCKETS = tuple(d * 10**e for e in range(7) for d in (1, 2, 5))
N_BUCKETS = (1, 2, 5, 10, 20)
PREEMPTION_BUCKETS = (0, 1, 2, 5, 10, 20, 50, 100)
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
# What clients may look for and nothing here counts: families without a value.
UNCOUNTED = (
    ("gauge", "lora_requests_info", "Adapters of requests: there are none."),
    ("counter", "spec_decode_num_accepted_tokens_per_pos", "Tokens of drafts that were right, by position."),
    ("counter", "corrupted_requests", "Requests with logits that are no numbers: not counted."),
)
TYPE = "text/plain; version=0.0.4; charset=utf-8"


def number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))


def escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def labelled(labels: dict[str, str]) -> str:
    return ",".join(f'{name}="{escape(value)}"' for name, value in labels.items())


class Histogram:
    """Counts of observations up to each bound, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def lines(self, name: str, labels: str) -> Iterator[str]:
        comma = "," if labels else ""
        seen = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            edge = "+Inf" if bound == float("inf") else number(bound)
            yield f'{name}_bucket{{{labels}{comma}le="{edge}"}} {seen}'
        yield f"{name}_sum{{{labels}}} {number(self.total)}"
        yield f"{name}_count{{{labels}}} {seen}"


class Metrics:
    """What the server process counts. The engine's own counters join at scrape time."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.first_token = Histogram(FIRST_TOKEN_BUCKETS)
        self.inter_token = Histogram(TOKEN_BUCKETS)
        self.per_output_token = Histogram(TOKEN_BUCKETS)
        self.end_to_end = Histogram(REQUEST_BUCKETS)
        self.queue = Histogram(REQUEST_BUCKETS)
        self.prefill = Histogram(REQUEST_BUCKETS)
        self.decode = Histogram(REQUEST_BUCKETS)
        self.inference = Histogram(REQUEST_BUCKETS)
        self.preemptions = Histogram(PREEMPTION_BUCKETS)
        self.prompt_tokens = Histogram(COUNT_BUCKETS)
        self.generation_tokens = Histogram(COUNT_BUCKETS)
        self.max_tokens = Histogram(COUNT_BUCKETS)
        self.n = Histogram(N_BUCKETS)
        self.finished: dict[str, int] = {}
        self.reasoning_tokens = 0
        self.malformed_tool_calls = 0
        self.tool_call_parses = 0
        self.bare_text_blocks = 0
        self.undeclared_tool_calls = 0
        self.grammar_rejects = 0
        self.http_requests: dict[tuple[str, str, str], int] = {}
        self.http_durations: dict[tuple[str, str], Histogram] = {}

    def count_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        key = (handler, method, f"{status // 100}xx")
        self.http_requests[key] = self.http_requests.get(key, 0) + 1
        if (handler, method) not in self.http_durations:
            self.http_durations[handler, method] = Histogram(HTTP_BUCKETS)
        self.http_durations[handler, method].observe(seconds)

    def count_finish(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def histograms(self) -> Iterator[tuple[str, str, Histogram]]:
        """Name, meaning and value."""
        yield "time_to_first_token_seconds", "Time to first token in seconds.", self.first_token
        yield "inter_token_latency_seconds", "Time between tokens of one sequence.", self.inter_token
        yield "request_time_per_output_token_seconds", "Mean time per token of a request.", self.per_output_token
        yield "e2e_request_latency_seconds", "Time from arrival to the last token.", self.end_to_end
        yield "request_queue_time_seconds", "Time from arrival to the first step that works on it.", self.queue
        yield "request_prefill_time_seconds", "Time from that step to the first token.", self.prefill
        yield "request_decode_time_seconds", "Time from the first token to the last.", self.decode
        yield "request_inference_time_seconds", "Time from the first step to the last token.", self.inference
        yield "request_num_preemptions", "Preemptions of a sequence.", self.preemptions
        yield "request_prompt_tokens", "Prompt tokens of a sequence.", self.prompt_tokens
        yield "request_generation_tokens", "Generated tokens of a sequence.", self.generation_tokens
        yield "request_max_num_generation_tokens", "Largest number of tokens a request may get.", self.max_tokens
        yield "request_params_max_tokens", "The max_tokens parameter, resolved.", self.max_tokens
        yield "request_params_n", "The n parameter.", self.n

    def text(self, stats: EngineStats, info: EngineInfo | None) -> str:
        """One scrape."""
        return "\n".join(self.lines(stats, info)) + "\n"

    def lines(self, stats: EngineStats, info: EngineInfo | None) -> Iterator[str]:
        labels = labelled({"model_name": self.model, "engine": "0"})

        def family(kind: str, name: str, meaning: str, samples: Iterable[tuple[str, float]]) -> Iterator[str]:
            suffix = "_total" if kind == "counter" else ""
            yield f"# HELP vllm:{name}{suffix} {meaning}"
            yield f"# TYPE vllm:{name}{suffix} {kind}"
            for extra, value in samples:
                yield f"vllm:{name}{suffix}{{{labels}{extra}}} {number(value)}"

        gauge, counter = "gauge", "counter"
        yield from family(gauge, "num_requests_running", "Sequences that run.", [("", stats.running)])
        yield from family(gauge, "num_requests_waiting", "Sequences that wait.", [("", stats.waiting)])
        waiting = [(',reason="capacity"', stats.waiting)]
        yield from family(gauge, "num_requests_waiting_by_reason", "Sequences that wait, by reason.", waiting)
        yield from family(gauge, "kv_cache_usage_perc", "Part of the cache that running sequences hold, 1 = all of it.",
                          [("", stats.cache_usage)])  # fmt: skip
        groups = [(f',group="{escape(g)}"', use) for g, use in sorted(stats.group_usage.items())]
        yield from family(
            gauge, "kv_cache_group_usage_perc", "Part of the cache that sequences hold in each group.", groups
        )
        if info is not None:
            facts = {f"blocks_{group}": str(blocks) for group, blocks in sorted(info.cache_groups.items())}
            facts |= {"max_model_len": str(info.max_length), "max_num_seqs": str(info.rows), "dtype": info.dtype}
            facts["cache_dtype"] = info.cache_dtype
            yield from family(gauge, "cache_config_info", "Facts of the cache.", [("," + labelled(facts), 1)])
        asleep = [(f',sleep_state="{state}"', state == "awake") for state in SLEEP_STATES]
        yield from family(gauge, "engine_sleep_state", "Which state the engine is in: it never sleeps.", asleep)
        for kind, name, meaning in UNCOUNTED:
            yield from family(kind, name, meaning, [])
        for name, meaning, value in (
            ("prompt_tokens", "Prompt tokens taken in.", stats.prompt_tokens),
            ("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", stats.cached_prompt_tokens),
            ("generation_tokens", "Generated tokens.", stats.generated_tokens),
            ("num_preemptions", "Sequences sent back to wait.", stats.preemptions),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prefix_queries),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", stats.prefix_hits),
            ("mm_cache_queries", "Images and audio looked up in their cache: none are taken.", 0),
            ("mm_cache_hits", "Images and audio found there.", 0),
            ("spec_decode_num_drafts", "Drafts of tokens: none are made.", 0),
            ("spec_decode_num_draft_tokens", "Tokens of drafts.", 0),
            ("spec_decode_num_accepted_tokens", "Tokens of drafts that were right.", 0),
            ("tool_call_parser_invocations", "Tool calls parsed.", self.tool_call_parses),
            ("malformed_tool_calls", "Tool calls given back as text.", self.malformed_tool_calls),
            ("undeclared_tool_calls", "Tool calls of tools that the request has not.", self.undeclared_tool_calls),
            ("grammar_rejects", "Grammars and schemas that could not be compiled.", self.grammar_rejects),
            ("bare_text_blocks", "Text the model wrote without a kind.", self.bare_text_blocks),
            ("reasoning_tokens", "Generated tokens that were thinking.", self.reasoning_tokens),
        ):
            yield from family(counter, name, meaning, [("", value)])
        reasons = [(f',finished_reason="{escape(r)}"', count) for r, count in sorted(self.finished.items())]
        yield from family(counter, "request_success", "Sequences that ended, by reason.", reasons)
        for name, meaning, histogram in self.histograms():
            yield f"# HELP vllm:{name} {meaning}"
            yield f"# TYPE vllm:{name} histogram"
            yield from histogram.lines(f"vllm:{name}", labels)
        steps = Histogram(STEP_BOUNDS)  # as the engine counted them
        steps.counts, steps.total = stats.step_sizes or steps.counts, float(stats.step_tokens)
        yield "# HELP vllm:iteration_tokens_total Tokens of a step."
        yield "# TYPE vllm:iteration_tokens_total histogram"
        yield from steps.lines("vllm:iteration_tokens_total", labels)
        yield from self.http_lines()

    def http_lines(self) -> Iterator[str]:
        yield "# HELP http_requests_total HTTP requests by handler, method and status."
        yield "# TYPE http_requests_total counter"
        for (handler, method, status), count in sorted(self.http_requests.items()):
            labels = labelled({"handler": handler, "method": method, "status": status})
            yield f"http_requests_total{{{labels}}} {count}"
        yield "# HELP http_request_duration_seconds Time until the last byte was handed to the socket."
        yield "# TYPE http_request_duration_seconds histogram"
        for (handler, method), histogram in sorted(self.http_durations.items()):
            labels = labelled({"handler": handler, "method": method})
            yield from histogram.lines("http_request_duration_seconds", labels)
