"""What an FP8 cache changes in a model's logits: against the cache in the model's dtype, at growing depths of one text.

    python bench/kv_quality.py [--shape inkling-tp8 | --model DIR] [--lengths 1024 8192 131072] [--device cpu]

The same weights run the same tokens twice through the engine, with each cache, and once more with the first cache in
chunks of another length: what rounding alone does, beside which the other difference is to be seen. Compared are the
logits of the last `--positions` tokens before each length, every token being given, none drawn: the share of them with
the same most likely word, Kullback-Leibler divergence in nats, and differences of logits. Weights of `--shape` are
random; there layers add little to the stream each, and `--sharpness` sets the spread of attention's scores, since flat
attention averages errors away; tokens are random too. A demo checkpoint is no better: figures of a trained model need
its checkpoint.
Results are JSON lines, also appended to `--out`; the last ones say how much of the codes' range keys and values used.

`--scales-out FILE` writes scales measured on these tokens for `inkcap serve --kv-cache-scales FILE`: the largest number
of each head times `--room`, divided by the largest code. The default, bounds from the weights, needs no such file.
"""

import argparse
import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from random import Random
from typing import TextIO

import torch
from rank import engine_of, facts, generate
from shapes import SHAPES, make_model
from torch import Tensor

from inkcap.base.checkpoint import find_checkpoint, read_config
from inkcap.base.config import CacheConfig, EngineConfig, ModelConfig, SchedConfig
from inkcap.base.log import start_logging
from inkcap.base.request import SamplingParams
from inkcap.layers.batch import Batch
from inkcap.models.base import Model
from inkcap.models.inkling.model import Inkling
from inkcap.models.inkling2.config import Inkling2Config
from inkcap.models.inkling2.model import Inkling2
from inkcap.models.registry import load_model
from inkcap.ops.attn_prep.ref import LARGEST, attn_prep, attn_prep_clip
from inkcap.ops.dispatch import Op, bind
from inkcap.parallel.comm import Comm

FP8 = torch.float8_e4m3fn


class Tapped:
    """A model whose hidden states of some positions are kept; `watched` is entered while it runs."""

    watched: AbstractContextManager[object] = nullcontext()

    def __init__(self, model: Model, wanted: list[range]) -> None:
        self.inner, self.wanted = model, wanted
        self.family, self.vocab_size = model.family, model.vocab_size
        self.max_length, self.states = model.max_length, model.states
        self.head, self.slots, self.unpack = model.head, model.slots, model.unpack
        self.kept: dict[int, Tensor] = {}  # position -> [D]

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states [T, D]."""
        with self.watched:
            hidden = self.inner.forward(batch)
        _, stop, _, first = batch.packing.spans[0]
        for wanted in self.wanted:
            for position in range(max(wanted.start, first), min(wanted.stop, first + stop)):
                self.kept[position] = hidden[position - first].clone()
        return hidden


def calm(model: Inkling | Inkling2, layers: int) -> None:
    """Make what layers add to the stream small beside it, as networks are initialised: 1 / sqrt(2 * layers).

    With outputs as large as the stream, a random network makes much of any difference, again and again. Where sizes are
    normed away, mixtures lean to the embedding instead: more than half of each is not of layers.
    """
    slots = model.slots()
    for name, slot in slots.items():
        if name.endswith(("attn_out.weight", "mlp.w2.weight", "experts.w2", "shared.w2")):
            slot.target.mul_((2 * layers) ** -0.5)
    if isinstance(model, Inkling2):
        embedding = slots["embed.weight"].target
        common = torch.randn(embedding.shape[1], generator=torch.Generator().manual_seed(1)).to(embedding.device)
        embedding.add_(common).mul_(0.5**0.5)
        for name, slot in slots.items():
            if name.endswith("query"):
                slot.target.copy_(common * (8 / len(common)) ** 0.5)  # scores 2 with the embedding, 0 with all else


def sharpen(model: Inkling, spread: float) -> None:
    """Make scores q . k / D of random normed heads have this standard deviation."""
    for layer in model.layers:
        size = layer.attention.heads.size
        for norm in (layer.attention.q_norm, layer.attention.k_norm):
            norm.weight.fill_((spread * size**0.5) ** 0.5)
        layer.attention.bound_codes(layer.attn_norm.weight)


def build(args: argparse.Namespace, device: torch.device, kv_dtype: torch.dtype | None) -> Model:
    """The model with one kind of cache; the same weights each time."""
    if args.model is not None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        return load_model(
            find_checkpoint(args.model),
            comm=Comm.alone(),
            dtype=dtype,
            device=device,
            progress=False,
            kv_dtype=kv_dtype,
        )
    model, _ = make_model(SHAPES[args.shape], "bf16", device, kv_dtype=kv_dtype)
    calm(model, len(model.layers))
    if isinstance(model, Inkling):
        sharpen(model, args.sharpness)
    return model


def run(
    model: Model,
    tokens: list[int],
    wanted: list[range],
    chunk: int,
    device: torch.device,
    memory: int | None,
    watched: AbstractContextManager[object] | None = None,
) -> list[Tensor]:
    """Logits [positions, words] in fp32 of each range of positions."""
    config = EngineConfig(
        model=ModelConfig(path="random", max_length=-(-(len(tokens) + 2) // 64) * 64, device=device.type, graphs=False),
        cache=CacheConfig(prefix=False, memory_bytes=memory),
        sched=SchedConfig(rows=1, step_tokens=chunk, chunk=chunk),
    )
    tapped = Tapped(model, wanted)
    with engine_of(config, tapped, device) as engine:
        tapped.watched = watched or nullcontext()  # behind the steps tried at start: they mean nothing
        generate(engine, [tokens], 1, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None))
    with torch.inference_mode():
        return [model.head(torch.stack([tapped.kept[position] for position in each])) for each in wanted]


class Largest:
    """The largest keys and values of each head and layer that an op returns, while it is watched."""

    def __init__(self, op: Op[..., tuple[Tensor, ...]], layers: list[int]) -> None:
        self.op, self.layers, self.calls = op, layers, 0  # layers: of each visit
        self.found: dict[str, Tensor] = {}

    def __enter__(self) -> "Largest":
        self.plain, self.op.function = self.op.function, self.call
        return self

    def __exit__(self, *_: object) -> None:
        self.op.function = self.plain

    def call(self, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
        """The op."""
        made = self.plain(*args, **kwargs)
        layer = self.layers[self.calls % len(self.layers)]
        self.calls += 1
        for name, x in zip("kv", made[1:3], strict=True):
            largest = x.abs().float().amax((0, 2))
            key = f"layers.{layer}.attention.{name}_scale"
            self.found[key] = torch.maximum(largest, self.found.get(key, largest))
        return made


def layers_of(model: Model, args: argparse.Namespace) -> list[int]:
    """The layer of each visit."""
    if isinstance(model, Inkling):
        return list(range(len(model.layers)))
    if args.model is None:
        shape = SHAPES[args.shape]
    else:
        shape = Inkling2Config.from_json(read_config(find_checkpoint(args.model)))
    return [layer for layer, _ in shape.visits()]


def compare(found: Tensor, wanted: Tensor) -> dict[str, object]:
    """Logits [N, words] of the same positions."""
    own, other = wanted.double().log_softmax(1), found.double().log_softmax(1)
    best = wanted.topk(2, 1).values
    same = found.argmax(1) == wanted.argmax(1)
    apart = (found - wanted).double()
    return {
        "top1_agreement": round(same.double().mean().item(), 4),
        "margin_of_disagreeing": round((best[:, 0] - best[:, 1])[~same].max().item(), 4) if not same.all() else None,
        "kl_nats": round((own.exp() * (own - other)).sum(1).mean().item(), 7),
        "rms_difference": round(apart.square().mean().sqrt().item(), 5),
        "largest_difference": round(apart.abs().max().item(), 4),
        "rms_logits": round(wanted.double().square().mean().sqrt().item(), 3),
        "positions": len(found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="inkling-tp8")
    parser.add_argument("--model", help="a checkpoint instead")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192, 32768, 131072])
    parser.add_argument("--positions", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--other-chunk", type=int, default=5000)
    parser.add_argument("--sharpness", type=float, default=3.0)
    parser.add_argument("--cache-memory", type=int, help="bytes")
    parser.add_argument("--scales-out", type=Path)
    parser.add_argument("--room", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kv_quality.jsonl")
    args = parser.parse_args()
    start_logging("bench", "warning")
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    bind(device, {})
    lengths = sorted(args.lengths)
    wanted = [range(max(0, length - args.positions), length) for length in lengths]
    model = build(args, device, None)
    random = Random(1)
    tokens = random.choices(range(model.vocab_size), k=lengths[-1])
    largest = Largest(attn_prep if isinstance(model, Inkling) else attn_prep_clip, layers_of(model, args))
    plain = run(model, tokens, wanted, args.chunk, device, args.cache_memory, largest)
    others = {"same cache, other chunks": run(model, tokens, wanted, args.other_chunk, device, args.cache_memory)}
    del model
    coded = build(args, device, FP8)
    others["fp8"] = run(coded, tokens, wanted, args.chunk, device, args.cache_memory)
    used = {name: largest.found[name] / slot.target / LARGEST for name, slot in coded.code_slots().items()}
    if args.scales_out is not None:
        measured = {name: (each * args.room / LARGEST).tolist() for name, each in largest.found.items()}
        args.scales_out.write_text(json.dumps(measured, indent=1) + "\n")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a") as file:
        for name, logits in others.items():
            for length, found, own in zip(lengths, logits, plain, strict=True):
                result = {
                    "bench": "kv_quality",
                    "model": args.model or args.shape,
                    "compared": name,
                    "length": length,
                    **compare(found, own),
                    "chunk": args.chunk,
                    **({} if args.model else {"weights": "bf16", "sharpness": args.sharpness}),
                    **facts(device),
                }
                record(file, result)
        for name, whole in (("k", "keys"), ("v", "values")):
            shares = torch.cat([share for key, share in used.items() if key.endswith(f"{name}_scale")])
            record(
                file,
                {
                    "bench": "kv_quality",
                    "model": args.model or args.shape,
                    "range_used_by": whole,
                    "least": round(shares.min().item(), 5),
                    "median": round(shares.median().item(), 5),
                    "most": round(shares.max().item(), 5),
                    "tokens": lengths[-1],
                },
            )


def record(file: TextIO, result: dict[str, object]) -> None:
    line = json.dumps(result)
    print(line, flush=True)
    file.write(line + "\n")


if __name__ == "__main__":
    main()
