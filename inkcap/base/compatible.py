"""Flags of `vllm serve`, so that a command written for it runs here with the program's name changed.

A flag means the same here, or does nothing here and says so, or is refused by name: none is accepted silently.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from inkcap.base.errors import ConfigInvalid

Found = tuple[dict[str, Any], str | None]  # fields that a flag sets, by section.name; what to tell the user
PARSERS = ("inkling",)
PREFIX = "vllm "  # of destinations in the parsed arguments; no field's name has a space


class Flag(NamedTuple):
    """One flag. `read` gets its name and value: None where it takes none."""

    names: tuple[str, ...]
    values: str | None  # argparse's nargs; None: takes none
    read: Callable[[str, Any], Found]
    summary: str


def refused(why: str) -> Callable[[str, Any], Found]:
    def read(name: str, _: Any) -> Found:
        raise ConfigInvalid(f"{name} is refused: {why}")

    return read


def idle(why: str) -> Callable[[str, Any], Found]:
    """A flag that does nothing here."""
    return lambda name, _: ({}, f"{name} does nothing: {why}")


def only(allowed: Iterable[str], why: str) -> Callable[[str, Any], Found]:
    """A flag with a value of which some ask for what is done anyway."""
    accepted = tuple(allowed)

    def read(name: str, value: Any) -> Found:
        text = " ".join(value) if isinstance(value, list) else str(value)
        if text not in accepted:
            raise ConfigInvalid(f"{name} {text[:80]!r} is refused: {why}; it may be {' or '.join(accepted)}")
        return {}, None

    return read


def sets(field: str, value: object = None) -> Callable[[str, Any], Found]:
    """Another spelling of a flag of ours: gives the field `value`, or the flag's own."""
    return lambda _, given: ({field: given if value is None else value}, None)


def parser_name(name: str, value: Any) -> Found:
    if value not in PARSERS:
        raise ConfigInvalid(f"{name} {value!r:.80} is unknown; this server has {' and '.join(PARSERS)}, always on")
    return {}, f"{name}: always on"


def json_object(name: str, value: str) -> dict[str, Any]:
    try:
        found = json.loads(value)
    except ValueError as error:
        raise ConfigInvalid(f"{name} {value!r:.80} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigInvalid(f"{name} {value!r:.80} is not a JSON object")
    return found


def origins(name: str, value: str) -> Found:
    try:
        found = json.loads(value)
    except ValueError:
        found = None
    if not isinstance(found, list):
        raise ConfigInvalid(f"{name} {value!r:.80} is not a JSON list of origins")
    return {"server.cors_origins": found}, None


def template_defaults(name: str, value: str) -> Found:
    """Template arguments for requests that give none: the effort is the only one this model's format has."""
    given = json_object(name, value)
    if unknown := set(given) - {"reasoning_effort"}:
        raise ConfigInvalid(f"{name} has {sorted(unknown)[0]!r:.80}; only reasoning_effort has a meaning here")
    effort = given.get("reasoning_effort")
    if isinstance(effort, bool) or not isinstance(effort, int | float):
        raise ConfigInvalid(f"{name}: reasoning_effort is {effort!r:.80}; give a number from 0 to 1")
    return {"server.default_effort": effort}, None


def no_media(name: str, value: str) -> Found:
    """Limits per prompt. This version takes text only, so the only limit it can keep is none at all."""
    wanted = [kind for kind, limit in json_object(name, value).items() if limit not in (0, {"count": 0})]
    if wanted:
        raise ConfigInvalid(f"{name} allows {wanted[0]!r:.80}, which is not built yet; use 0 or leave it out")
    return {}, None


def grammar(name: str, value: str) -> Found:
    for key, given in json_object(name, value).items():
        if key == "reasoning_parser":
            parser_name(f"{name}: {key}", given)
        elif key != "backend" or given not in ("auto", "guidance"):
            raise ConfigInvalid(f"{name} has {key} {given!r:.80}; only backend auto or guidance is built")
    return {}, None


ALWAYS = "it is always so here"
UNBUILT = "it is not built yet"
CHOSEN = "the engine chooses this itself; `inkcap plan` and `inkcap ops` show what"
STORED = "the checkpoint says how its weights are stored"


def _several(names: str, values: str | None, read: Callable[[str, Any], Found], summary: str) -> list[Flag]:
    return [Flag((name,), values, read, summary) for name in names.split()]


FLAGS: list[Flag] = [
    # the model
    *_several("--tokenizer-mode", "1", only(("auto", "inkling"), "the models have one tokenizer"), "auto or inkling"),
    *_several("--trust-remote-code --no-trust-remote-code", None, idle("no code of a checkpoint is ever run"),
              "does nothing"),
    *_several("--load-format", "1", only(("auto", "safetensors"), "checkpoints are safetensors"), "safetensors"),
    *_several("--config-format", "1", only(("auto", "hf"), "checkpoints have a config.json"), "auto"),
    *_several("--model-impl", "1", only(("auto",), "there is one implementation"), "auto"),
    *_several("--runner --task", "1", only(("auto", "generate"), "these models generate"), "auto or generate"),
    *_several("--convert", "1", only(("auto", "none"), "these models generate"), "auto"),
    *_several("--quantization -q", "1", refused(f"{STORED}; leave it out"), "refused"),
    *_several("--tokenizer --tokenizer-revision --code-revision --hf-config-path --hf-token --download-dir", "1",
              refused("everything comes from the checkpoint; leave it out"), "refused"),
    *_several("--hf-overrides --model-loader-extra-config --chat-template --mm-processor-kwargs", "1",
              refused("the model's own format and numbers are used"), "refused"),
    *_several("--chat-template-content-format", "1", only(("auto", "openai"), "parts are rendered natively"), "auto"),
    *_several("--skip-tokenizer-init --enable-sleep-mode", None, refused(UNBUILT), "refused"),
    Flag(("--default-chat-template-kwargs",), "1", template_defaults, "JSON with reasoning_effort"),
    # the engine
    Flag(("-tp",), "1", sets("parallel.tp"), "--tensor-parallel-size"),
    *_several("--pipeline-parallel-size -pp --data-parallel-size -dp --decode-context-parallel-size -dcp "
              "--prefill-context-parallel-size -pcp --nnodes --api-server-count", "1",
              only(("1",), "more is not built yet"), "1"),
    *_several("--data-parallel-size-local --data-parallel-address --data-parallel-rpc-port --data-parallel-backend "
              "--data-parallel-rank --data-parallel-start-rank --master-addr --master-port", "1", refused(UNBUILT),
              "refused"),
    *_several("--node-rank", "1", only(("0",), "several nodes are not built yet"), "0"),
    *_several("--enable-expert-parallel -ep --enable-eplb --enable-dbo --headless --data-parallel-hybrid-lb "
              "--data-parallel-external-lb", None, refused(UNBUILT), "refused"),
    *_several("--no-enable-expert-parallel --no-enable-eplb --no-enable-dbo --no-enable-lora --no-enable-sleep-mode",
              None, idle(ALWAYS), "does nothing"),
    *_several("--enable-lora", None, refused(UNBUILT), "refused"),
    *_several("--lora-modules", "*", refused(UNBUILT), "refused"),
    *_several("--max-loras --max-lora-rank --max-cpu-loras --lora-dtype --speculative-config --kv-transfer-config "
              "--ec-transfer-config --kv-events-config --kv-offloading-size --kv-offloading-backend --eplb-config "
              "--compilation-config -cc --logits-processors --worker-cls --worker-extension-cls --profiler-config "
              "--additional-config --pooler-config", "1", refused(UNBUILT), "refused"),
    *_several("--block-size --num-gpu-blocks-override --attention-backend --moe-backend --all2all-backend "
              "--max-num-partial-prefills --max-long-partial-prefills --long-prefill-token-threshold "
              "--max-cudagraph-capture-size --mm-encoder-tp-mode", "1", refused(f"{CHOSEN}; leave it out"), "refused"),
    *_several("--cuda-graph-sizes --cudagraph-capture-sizes", "*", refused(f"{CHOSEN}; leave it out"), "refused"),
    *_several("--optimization-level -O", "1", refused(f"{CHOSEN}; leave it out"), "refused"),
    *_several("--cpu-offload-gb --swap-space", "1", only(("0", "0.0"), "weights are not moved out of the device"), "0"),
    *_several("--enforce-eager", None, sets("model.graphs", False), "--no-cuda-graphs"),
    *_several("--calculate-kv-scales", None, idle("scales of an fp8 cache are made of the weights"), "does nothing"),
    *_several("--kv-cache-memory-bytes", "1", sets("cache.memory_bytes"), "--cache-memory"),
    *_several("--enable-prefix-caching", None, sets("cache.prefix", True), "--prefix-caching"),
    *_several("--no-enable-prefix-caching", None, sets("cache.prefix", False), "--no-prefix-caching"),
    *_several("--prefix-caching-hash-algo", "1", only(("sha256",), "keys are cryptographic hashes"), "sha256"),
    *_several("--enable-chunked-prefill --async-scheduling --disable-custom-all-reduce --disable-cascade-attn", None,
              idle(ALWAYS), "does nothing"),
    *_several("--no-enable-chunked-prefill --no-async-scheduling", None, refused("there is no other way here"),
              "refused"),
    *_several("--scheduling-policy", "1", only(("fcfs", "priority"), "order is priority, then arrival"), "fcfs"),
    *_several("--distributed-executor-backend", "1", only(("mp", "uni"), "ranks are processes of this host"), "mp"),
    *_several("--structured-outputs-config", "1", grammar, "JSON with backend auto or guidance"),
    *_several("--stream-interval", "1", only(("1",), "tokens are sent as they come"), "1"),
    # media
    *_several("--limit-mm-per-prompt", "1", no_media, "JSON; 0 for each kind"),
    *_several("--language-model-only", None, idle("this version takes text only"), "does nothing"),
    *_several("--allowed-local-media-path --media-io-kwargs --mm-processor-cache-gb --video-pruning-rate", "1",
              refused("images and audio are not built yet"), "refused"),
    *_several("--allowed-media-domains", "*", refused("images and audio are not built yet"), "refused"),
    # the server
    *_several("--reasoning-parser --tool-call-parser", "1", parser_name, "inkling"),
    *_several("--enable-auto-tool-choice", None, idle("tools are always on"), "does nothing"),
    *_several("--reasoning-parser-plugin --tool-parser-plugin --middleware --tool-server", "1", refused(UNBUILT),
              "refused"),
    *_several("--enable-prompt-tokens-details --enable-server-load-tracking --enable-request-id-headers "
              "--enable-force-include-usage-details", None, idle(ALWAYS), "does nothing"),
    *_several("--disable-log-requests --no-enable-log-requests --disable-uvicorn-access-log --no-enable-log-outputs",
              None, idle("requests are not logged"), "does nothing"),
    *_several("--enable-log-requests --enable-log-outputs --enable-ssl-refresh --enable-force-include-usage "
              "--enable-offline-docs --exclude-tools-when-tool-choice-none --return-tokens-as-token-ids "
              "--enable-prompt-embeds --enable-mm-embeds", None, refused(UNBUILT), "refused"),
    *_several("--max-log-len --collect-detailed-traces --response-format-retries --uds", "1", refused(UNBUILT),
              "refused"),
    *_several("--response-role", "1", only(("assistant",), "answers are the assistant's"), "assistant"),
    *_several("--disable-log-stats", None, sets("server.log_stats", False), "--no-log-stats"),
    *_several("--disable-fastapi-docs", None, sets("server.docs", False), "--no-docs"),
    *_several("--allowed-origins", "1", origins, "JSON list; see --cors-origin"),
    *_several("--allowed-methods --allowed-headers", "1", only(('["*"]',), "all of them are allowed"), "all"),
    *_several("--allow-credentials", None, refused("the API has keys, not cookies"), "refused"),
    *_several("--h11-max-incomplete-event-size", "1", sets("server.header_bytes"), "--header-bytes"),
    *_several("--h11-max-header-count", "1", sets("server.header_count"), "--header-count"),
]  # fmt: skip


def add_compatible_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag of the table. Several uses of one are all read."""
    group = parser.add_argument_group("flags of vllm serve", "accepted, or refused by name")
    for flag in FLAGS:
        common: dict[str, Any] = {"dest": PREFIX + flag.names[0], "action": "append", "help": argparse.SUPPRESS}
        if flag.values is None:
            group.add_argument(*flag.names, **{**common, "action": "append_const", "const": None})
        else:
            group.add_argument(*flag.names, nargs=None if flag.values == "1" else flag.values, **common)


def read_compatible_flags(arguments: argparse.Namespace) -> list[str]:
    """Put what the table's flags set into `arguments`; gives what they have to say. Raises ConfigInvalid.

    A flag of ours that is given too has to say the same.
    """
    notes: list[str] = []
    given = vars(arguments)
    by_name = {flag.names[0]: flag for flag in FLAGS}
    for name, flag in by_name.items():
        for value in given.pop(PREFIX + name, None) or ():
            fields, note = flag.read(name, value)
            for field, wanted in fields.items():
                if given.get(field) not in (None, wanted):
                    raise ConfigInvalid(f"{name} contradicts another flag, which sets {field} to {given[field]!r:.80}")
                given[field] = wanted
            notes += [note] if note else []
    if given.get("model.max_length") in ("auto", "-1"):
        given["model.max_length"] = None
    return notes


def dashed(words: Sequence[str]) -> list[str]:
    """Flags as argparse knows them: underscores in a flag's name are dashes."""
    found: list[str] = []
    for word in words:
        name, sign, value = word.partition("=")
        found.append(name.replace("_", "-") + sign + value if name.startswith("--") else word)
    return found
