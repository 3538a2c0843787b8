"""Commands written for `vllm serve`: what they set here, what is said, and what is refused by name."""

import argparse
import re

import pytest

from inkcap.__main__ import main
from inkcap.base.compatible import FLAGS, add_compatible_flags, dashed, read_compatible_flags
from inkcap.base.errors import ConfigInvalid
from inkcap.base.flags import add_flags, config_from_flags


def parse(*words):
    """The configuration, and what there is to say about it."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model.path")
    add_flags(parser)
    add_compatible_flags(parser)
    arguments = parser.parse_args(dashed(["folder", *words]))
    notes = read_compatible_flags(arguments)
    return config_from_flags(arguments), notes


def test_a_published_command_runs_as_it_is():
    words = (
        "--tensor-parallel-size 8 --pipeline-parallel-size 1 --data-parallel-size 1 --trust-remote-code "
        "--tokenizer-mode inkling --reasoning-parser inkling --tool-call-parser inkling --enable-auto-tool-choice "
        "--max-num-seqs 32 --max-num-batched-tokens 8k --max-model-len 32K --kv-cache-dtype auto --dtype bfloat16 "
        "--gpu-memory-utilization 0.8 --enable-prefix-caching --host 0.0.0.0 --port 9000 --seed 7 --root-path /x "
        "--generation-config vllm --override-generation-config {\"temperature\":0.5} --served-model-name a b "
        "--api-key k --max-logprobs 5 --disable-log-requests --uvicorn-log-level error --enable-request-id-headers "
        "--limit-mm-per-prompt {\"image\":0} --enable-prompt-tokens-details --revision main -tp 8"
    )  # fmt: skip
    with pytest.raises(ConfigInvalid, match="-tp contradicts another flag"):
        parse(*words.replace("-tp 8", "-tp 4").split())
    config, notes = parse(*words.removesuffix(" -tp 8").split())
    assert (config.parallel.tp, config.sched.rows, config.sched.step_tokens) == (8, 32, 8000)
    assert (config.model.max_length, config.model.dtype, config.model.seed) == (32768, "bfloat16", 7)
    assert (config.cache.prefix, config.model.served_names, config.model.revision) == (True, ("a", "b"), "main")
    server = config.server
    assert (server.host, server.port, server.root_path, server.api_key) == ("0.0.0.0", 9000, "/x", "k")
    assert (server.generation_config, server.max_logprobs, server.web_log_level) == ("vllm", 5, "error")
    assert "--trust-remote-code does nothing: no code of a checkpoint is ever run" in notes
    assert "--tool-call-parser: always on" in notes


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--no-enable-prefix-caching", "cache.prefix", False),
        ("--tensor_parallel_size=2", "parallel.tp", 2),
        ("-tp 2", "parallel.tp", 2),
        ("--max-model-len auto", "model.max_length", None),
        ("--max-model-len 1.5k", "model.max_length", 1500),
        ("--kv-cache-memory-bytes 2GiB", "cache.memory_bytes", 2 << 30),
        ("--enforce-eager", "model.graphs", False),
        ("--disable-log-stats", "server.log_stats", False),
        ("--disable-fastapi-docs", "server.docs", False),
        ("--allowed-origins [\"https://a\"]", "server.cors_origins", ("https://a",)),
        ("--default-chat-template-kwargs {\"reasoning_effort\":0.2}", "server.default_effort", 0.2),
        ("--h11-max-header-count 7", "server.header_count", 7),
        ("--enable-tokenizer-info-endpoint", "server.tokenizer_info", True),
        ("--otlp-traces-endpoint http://x", "server.trace_endpoint", "http://x"),
        ("--structured-outputs-config {\"backend\":\"guidance\"}", "server.docs", True),
    ],
)  # fmt: skip
def test_flags_that_mean_a_field(words, field, value):
    section, name = field.split(".")
    config, notes = parse(*words.split())
    assert getattr(getattr(config, section), name) == value
    assert notes == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--pipeline-parallel-size 2", "--pipeline-parallel-size '2' is refused"),
        ("-dp 2", "--data-parallel-size|-dp '2' is refused"),
        ("--enable-expert-parallel", "--enable-expert-parallel is refused: it is not built yet"),
        ("--enable-lora", "--enable-lora is refused"),
        ("--lora-modules a=b c=d", "--lora-modules is refused"),
        ("--speculative-config {\"method\":\"mtp\"}", "--speculative-config is refused"),
        ("--tool-call-parser hermes", "'hermes' is unknown; this server has inkling"),
        ("--reasoning-parser deepseek_r1", "'deepseek_r1' is unknown"),
        ("--tokenizer-mode slow", "'slow' is refused"),
        ("--kv-cache-dtype fp8_e5m2", "'fp8_e5m2'; it must be auto, bf16, fp8 or fp8_e4m3"),
        ("--dtype float16", "auto, bfloat16 or float32"),
        ("--quantization awq", "--quantization is refused"),
        ("--limit-mm-per-prompt {\"image\":4}", "'image', which is not built yet"),
        ("--limit-mm-per-prompt 4", "not a JSON object"),
        ("--limit-mm-per-prompt {", "is not JSON"),
        ("--default-chat-template-kwargs {\"enable_thinking\":false}", "enable_thinking"),
        ("--structured-outputs-config {\"backend\":\"outlines\"}", "outlines"),
        ("--allowed-origins *", "JSON list"),
        ("--prefix-caching --no-enable-prefix-caching", "contradicts another flag"),
        ("--distributed-executor-backend ray", "'ray' is refused"),
        ("--mm-processor-kwargs {}", "--mm-processor-kwargs is refused"),
        ("--swap-space 4", "'4' is refused"),
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused_by_name(words, said):
    with pytest.raises(ConfigInvalid, match=said):
        parse(*words.split())


# Every flag that a published command for these models has, with a value that such a command gives it: the field that it
# sets, a part of what is said about it, or a part of the refusal.
LISTED = [
    ("--tokenizer-mode inkling", None, None),
    ("--reasoning-parser inkling", None, "always on"),
    ("--tool-call-parser inkling", None, "always on"),
    ("--enable-auto-tool-choice", None, "tools are always on"),
    ('--speculative-config {"method":"mtp","num_speculative_tokens":4}', None, "--speculative-config is refused"),
    ("--served-model-name one two", ("model.served_names", ("one", "two")), None),
    ("--api-key k", ("server.api_key", "k"), None),
    ("--max-model-len 256K", ("model.max_length", 262144), None),
    ('--limit-mm-per-prompt {"image":8}', None, "'image', which is not built yet"),
    ('--mm-processor-kwargs {"max_image_tokens":1024}', None, "--mm-processor-kwargs is refused"),
    ("--allowed-media-domains example.org", None, "--allowed-media-domains is refused"),
    ("--allowed-local-media-path /data", None, "--allowed-local-media-path is refused"),
    ("--max-logprobs 50", ("server.max_logprobs", 50), None),
    ("--enable-prompt-tokens-details", None, "always so"),
    ("--root-path /v", ("server.root_path", "/v"), None),
    ("--uvicorn-log-level warning", ("server.web_log_level", "warning"), None),
    ("--ssl-keyfile k.pem", ("server.ssl_keyfile", "k.pem"), None),
    ("--ssl-certfile c.pem", ("server.ssl_certfile", "c.pem"), None),
    ("--ssl-ca-certs a.pem", ("server.ssl_ca_certs", "a.pem"), None),
    ("--ssl-cert-reqs 2", ("server.ssl_cert_reqs", 2), None),
    ("--enable-ssl-refresh", None, "--enable-ssl-refresh is refused"),
    ("--enable-request-id-headers", None, "always so"),
    ("--disable-log-requests", None, "requests are not logged"),
    ("--tensor-parallel-size 8", ("parallel.tp", 8), None),
    ("--enable-prefix-caching", ("cache.prefix", True), None),
    ("--no-enable-prefix-caching", ("cache.prefix", False), None),
    ("--gpu-memory-utilization 0.95", ("cache.gpu_utilization", 0.95), None),
    ("--max-num-seqs 128", ("sched.rows", 128), None),
    ("--max-num-batched-tokens 16384", ("sched.step_tokens", 16384), None),
    ("--kv-cache-dtype auto", ("cache.dtype", "auto"), None),
    ("--kv-cache-dtype fp8", ("cache.dtype", "fp8"), None),
    ("--dtype bfloat16", ("model.dtype", "bfloat16"), None),
    ("--enable-lora", None, "--enable-lora is refused"),
    ("--trust-remote-code", None, "no code of a checkpoint is ever run"),
    ("--host 0.0.0.0", ("server.host", "0.0.0.0"), None),
    ("--port 8080", ("server.port", 8080), None),
    ("--seed 3", ("model.seed", 3), None),
    ("--generation-config vllm", ("server.generation_config", "vllm"), None),
    ('--override-generation-config {"top_p":0.9}', ("server.generation_override", '{"top_p":0.9}'), None),
    ("--pipeline-parallel-size 2", None, "'2' is refused"),
    ("--data-parallel-size 2", None, "'2' is refused"),
    ("--enable-expert-parallel", None, "--enable-expert-parallel is refused"),
]


REFUSALS = "refused", "not built"


@pytest.mark.parametrize(("words", "sets", "said"), LISTED, ids=[words for words, _, _ in LISTED])
def test_each_flag_of_published_commands(words, sets, said):
    if said is not None and any(refusal in said for refusal in REFUSALS):
        with pytest.raises(ConfigInvalid, match=re.escape(said)):
            parse(*words.split())
        return
    config, notes = parse(*words.split())
    if sets is not None:
        section, name = sets[0].split(".")
        assert getattr(getattr(config, section), name) == sets[1]
    assert [said in note for note in notes] == ([] if said is None else [True])


def test_every_flag_of_the_table_answers():
    """None is swallowed: each sets something, says something, refuses, or takes only what is done anyway."""
    for flag in FLAGS:
        try:
            answered = any(flag.read(flag.names[0], None if flag.values is None else "no-such-value"))
        except ConfigInvalid as error:
            answered = flag.names[0] in str(error)
        assert answered, f"{flag.names[0]} is accepted silently"


def test_the_command_refuses_before_it_starts(capsys):
    assert main(["serve", "nowhere", "--enable_expert_parallel"]) == 2
    assert capsys.readouterr().err == "inkcap serve: --enable-expert-parallel is refused: it is not built yet\n"
    assert main(["serve", "nowhere", "--enable-warp-drive"]) == 2
    assert "--enable-warp-drive" in capsys.readouterr().err
