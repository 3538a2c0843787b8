"""Which models there are, and what their config.json says of them. No torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from inkcap.base.errors import CheckpointMismatch
from inkcap.base.formats import WeightFormat
from inkcap.cache.state import LayerState
from inkcap.models.inkling.config import InklingConfig
from inkcap.models.inkling2.config import Inkling2Config
from inkcap.models.states import AttentionSize
from inkcap.parallel.share import Place

EXPERTS = tuple(f"model.llm.layers.{{n}}.mlp.experts.{part}_weight" for part in ("w13", "w2"))  # what may be quantised


class TextConfig(Protocol):
    """What the configurations of both generations answer."""

    @property
    def num_hidden_layers(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_length(self) -> int: ...

    @property
    def expert_width(self) -> int: ...

    @property
    def dense_width(self) -> int | None: ...

    def attention(self, layer: int) -> AttentionSize:
        """The heads of a layer."""
        ...

    def expert_layers(self) -> tuple[int, ...]:
        """Layers that have experts."""
        ...

    def quantised_layers(self) -> tuple[int, ...]:
        """Layers that are quantised in a checkpoint where any is."""
        ...

    def states(self, place: Place, dtype: str, kv_dtype: str | None = None) -> list[LayerState]:
        """What every visit of every layer keeps on one rank; keys and values in `dtype` too unless in `kv_dtype`."""
        ...


@dataclass(frozen=True)
class Generation:
    """What the checkpoints of a generation have in common."""

    nvfp4: WeightFormat  # the layout of NVFP4
    mxfp8: bool  # whether there is MXFP8 too
    read: Callable[[Mapping[str, object]], TextConfig]  # a parsed config.json; raises CheckpointMismatch


@dataclass(frozen=True)
class Entry:
    """One kind of model, as named in config.json."""

    architecture: str  # an entry of `architectures`
    model_type: str
    family: str
    reads: str  # for people: what a checkpoint of this kind gives
    generation: Generation


INKLING = Generation(nvfp4=WeightFormat.NVFP4_SCALE2, mxfp8=False, read=InklingConfig.from_json)
INKLING2 = Generation(nvfp4=WeightFormat.NVFP4, mxfp8=True, read=Inkling2Config.from_json)
PUBLISHED, SAVED = "text of the published models", "text-only models saved by transformers"
REGISTRY = (
    Entry("InklingForConditionalGeneration", "inkling_mm_model", "inkling", PUBLISHED, INKLING),
    Entry("InklingForCausalLM", "inkling_text", "inkling", SAVED, INKLING),
    Entry("Inkling2ForConditionalGeneration", "inkling2", "inkling2", PUBLISHED, INKLING2),
    Entry("Inkling2ForCausalLM", "inkling2_text", "inkling2", SAVED, INKLING2),
    Entry(
        "Inkling2LoopForConditionalGeneration",
        "inkling2_loop",
        "inkling2",
        "text of the published looped models",
        INKLING2,
    ),
    Entry(
        "Inkling2LoopForCausalLM",
        "inkling2_loop_text",
        "inkling2",
        "looped text-only models saved by transformers",
        INKLING2,
    ),
)


def supported() -> list[tuple[str, str, str, str]]:
    """(architecture, model_type, family, what it gives) of every model that can be loaded."""
    return [(entry.architecture, entry.model_type, entry.family, entry.reads) for entry in REGISTRY]


def find_entry(config: Mapping[str, object]) -> Entry:
    """The model a config.json names. Raises CheckpointMismatch, listing those there are."""
    architectures, model_type = config.get("architectures"), config.get("model_type")
    named = architectures if isinstance(architectures, list) else []
    for entry in REGISTRY:
        if entry.architecture in named or (not named and entry.model_type == model_type):
            return entry
    known = ", ".join(entry.architecture for entry in REGISTRY)
    raise CheckpointMismatch(
        f"config.json names architectures {architectures!r} and model_type {model_type!r}; supported are {known}"
    )


def expert_names(layers: int) -> dict[int, tuple[str, str]]:
    """Names of w13 and w2 of each layer, under which they may be quantised."""
    w13, w2 = EXPERTS
    return {n: (w13.replace("{n}", str(n)), w2.replace("{n}", str(n))) for n in range(layers)}
