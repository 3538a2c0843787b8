"""Tokens per second on a CPU beside transformers: the same checkpoint, the same threads, in one run.

    python bench/cpu.py [--family inkling|inkling2|inkling2-mini] [--threads 2] [--rounds 3] [--batch 1 8]

The checkpoint is random, in fp32: hidden 512, 12 layers, 32 experts of which 6 + 2 work, 8192 words; inkling2
has 8 of 32 experts at work, and its mini visits 6 of 12 layers three times. transformers runs
its eager attention in a bare loop of forward passes (its `generate` is slower), inkcap runs whole: engine, scheduler,
sampler, detached from tokenizer and server. Each has a process of its own: threads of two pools in one process sleep
and wake at every product, which makes both slower. Rounds alternate between the two; the best of each counts, since
whatever else the machine does only adds time. Prints a JSON line per batch size and a line for people.
"""

import argparse
import json
import multiprocessing
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import transformers
from transformers import (
    Inkling2ForCausalLM,
    Inkling2LoopForCausalLM,
    Inkling2LoopTextConfig,
    Inkling2TextConfig,
    InklingForCausalLM,
    InklingTextConfig,
    PreTrainedModel,
)

from inkcap import LLM, SamplingParams

PROMPT = 64  # tokens
ANSWER = 64  # tokens that are timed, after the first
TEXT = {
    "hidden_size": 512,
    "num_hidden_layers": 12,
    "vocab_size": 8192,
    "unpadded_vocab_size": 8100,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 64,
    "sliding_window_size": 64,
    "local_layer_ids": [layer for layer in range(12) if layer % 6 != 5],
    "d_rel": 16,
    "rel_extent": 128,
    "log_scaling_n_floor": 100,
    "dense_mlp_idx": 2,
    "dense_intermediate_size": 2048,
    "intermediate_size": 256,
    "n_routed_experts": 32,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
}

SECOND = {
    name: TEXT[name]
    for name in (
        "hidden_size", "num_hidden_layers", "vocab_size", "unpadded_vocab_size", "num_attention_heads",
        "num_key_value_heads", "head_dim", "swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim",
        "sliding_window_size", "d_rel", "rel_extent", "log_scaling_n_floor", "n_routed_experts",
    )
}  # fmt: skip
SECOND |= {"moe_intermediate_size": 256, "num_experts_per_tok": 8, "n_layers_per_attn_res_block": 3, "eos_token_id": 3}
LOOP = {"loop_layer_index_start": 3, "loop_layer_index_end": 9, "loop_num_passes": 3, "loop_gate_rank": 16}

Times = tuple[float, float, list[list[int]]]  # seconds to the first token, seconds to the last, tokens


def make(family: str) -> PreTrainedModel:
    """A random model of transformers."""
    if family == "inkling":
        return InklingForCausalLM(InklingTextConfig(**TEXT, pad_token_id=0, attn_implementation="eager"))
    if family == "inkling2":
        return Inkling2ForCausalLM(Inkling2TextConfig(**SECOND, attn_implementation="eager"))
    return Inkling2LoopForCausalLM(Inkling2LoopTextConfig(**SECOND, **LOOP, attn_implementation="eager"))


def run_transformers(model: PreTrainedModel, prompts: list[list[int]]) -> Times:
    """Greedy, one forward pass a token."""
    with torch.inference_mode():
        begin = time.perf_counter()
        out = model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        tokens = [out.logits[:, -1].argmax(-1)]
        first = time.perf_counter()
        for _ in range(ANSWER):
            out = model(tokens[-1][:, None], cache=out.cache, use_cache=True)
            tokens.append(out.logits[:, -1].argmax(-1))
        end = time.perf_counter()
    return first - begin, end - begin, torch.stack(tokens, 1).tolist()


def rival(connection: Connection, family: str, directory: str, threads: int) -> None:
    """A process that makes the model, saves it, and then answers each list of prompts with what `Times` says of it."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    model = make(family).eval()
    model.save_pretrained(directory)
    connection.send("saved")
    while (prompts := connection.recv()) is not None:
        connection.send(run_transformers(model, prompts))


def run_inkcap(llm: LLM, prompts: list[list[int]]) -> Times:
    """Greedy through the whole engine; a run of one token gives the time of the prompt."""
    times, answers = [], []
    for count in (1, 1 + ANSWER):
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        begin = time.perf_counter()
        answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        times.append(time.perf_counter() - begin)
    return times[0], times[1], [list(answer.outputs[0].token_ids) for answer in answers]


def best(runs: list[Times]) -> tuple[float, float]:
    """The shortest time to the first token, and what the shortest time to the last is longer.

    The shortest difference would be that of a round whose first token was held up.
    """
    first = min(run[0] for run in runs)
    return first, min(run[1] for run in runs) - first


def agreement(left: list[list[int]], right: list[list[int]]) -> float:
    """Share of equal tokens, until the two first differ in a sequence."""
    same = total = 0
    for a, b in zip(left, right, strict=True):
        total += len(a)
        same += next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    return same / total


def commit() -> str:
    """The commit that is measured, marked if the tree differs from it."""
    root = Path(__file__).parents[1]

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--", "inkcap") else "")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=("inkling", "inkling2", "inkling2-mini"), default="inkling")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        connection, far = multiprocessing.Pipe()
        told = (far, options.family, directory, options.threads)
        multiprocessing.get_context("spawn").Process(target=rival, args=told, daemon=True).start()
        connection.recv()

        def ask(prompts: list[list[int]]) -> Times:
            connection.send(prompts)
            return connection.recv()

        llm = LLM(
            directory,
            dtype="float32",
            threads=options.threads,
            max_model_len=1024,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )
        with llm:
            for batch in options.batch:
                prompts = torch.randint(0, TEXT["unpadded_vocab_size"], (batch, PROMPT)).tolist()
                engines: dict[str, Callable[[], Times]] = {
                    "transformers": lambda prompts=prompts: ask(prompts),
                    "inkcap": lambda prompts=prompts: run_inkcap(llm, prompts),
                }
                for run in engines.values():
                    run()
                runs: dict[str, list[Times]] = {name: [] for name in engines}
                for _ in range(options.rounds):
                    for name, run in engines.items():
                        runs[name].append(run())
                report(options.family, batch, options.threads, runs)
        connection.send(None)


def report(family: str, batch: int, threads: int, runs: dict[str, list[Times]]) -> None:
    """One JSON line, one line for people."""
    figures: dict[str, float] = {}
    for name, several in runs.items():
        first, rest = best(several)
        figures[f"{name}_prefill_tokens_per_second"] = round(batch * PROMPT / first, 1)
        figures[f"{name}_decode_tokens_per_second"] = round(batch * ANSWER / rest, 1)
    ours, theirs = figures["inkcap_decode_tokens_per_second"], figures["transformers_decode_tokens_per_second"]
    figures["decode_ratio"] = round(ours / theirs, 2)
    figures["prefill_ratio"] = round(
        figures["inkcap_prefill_tokens_per_second"] / figures["transformers_prefill_tokens_per_second"], 2
    )
    figures["equal_tokens"] = round(agreement(runs["inkcap"][0][2], runs["transformers"][0][2]), 3)
    where = {
        "threads": threads,
        "load": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "commit": commit(),
    }
    print(json.dumps({"bench": "cpu", "family": family, "batch": batch, **figures, **where}))
    print(
        f"batch {batch}: decode {ours:.0f} tokens/s, transformers {theirs:.0f} ({figures['decode_ratio']}x); prefill "
        f"{figures['prefill_ratio']}x; {100 * figures['equal_tokens']:.0f} % equal tokens; load {where['load']}"
    )


if __name__ == "__main__":
    main()
