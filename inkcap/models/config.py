"""What both generations read alike in a config.json, and check alike. No torch."""

from collections.abc import Mapping

from inkcap.base.errors import CheckpointMismatch
from inkcap.base.fields import Fields


def text_of(config: Mapping[str, object], only: Mapping[str, object]) -> Fields:
    """The text model's object. `only`: settings of which one value is supported, where they are present."""
    whole = Fields(config, "config.json")
    text = whole.block("text_config") if whole.has("text_config") else whole
    for name, supported in only.items():
        text.only(name, supported)
    return text


def unpadded(text: Fields) -> int:
    """Published checkpoints pad the vocabulary; null, as transformers writes it, means that nothing is padding."""
    if text.null("unpadded_vocab_size"):
        return text.integer("vocab_size")
    return text.integer("unpadded_vocab_size", most=text.integer("vocab_size"))


def local_layers(text: Fields, layers: int) -> tuple[int, ...]:
    """From the list of sliding layers (published) or the kind of every layer (transformers); both must agree."""
    ids = None if text.null("local_layer_ids") else text.indices("local_layer_ids", layers)
    if text.null("layer_types"):
        if ids is None:
            raise CheckpointMismatch(f"{text.where} has neither local_layer_ids nor layer_types")
        return ids
    kinds = text.choices("layer_types", ("hybrid_sliding", "hybrid"), layers)
    named = tuple(i for i, kind in enumerate(kinds) if kind == "hybrid_sliding")
    if ids is not None and ids != named:
        raise text.wrong("local_layer_ids", f"{list(named)}, which is what layer_types calls hybrid_sliding")
    return named


def conv_width(text: Fields) -> int:
    """Cache blocks of the convolutions are as long as the kernel, and must divide a grain of 64 tokens."""
    names = ("sconv_kernel_size", "conv_kernel_size")
    size = text.integer(*names, least=2, most=64)
    if 64 % size:
        raise text.wrong(text.spelled(*names), "2, 4, 8, 16, 32 or 64")
    return size


def check_together(text: Fields) -> None:
    """Raise CheckpointMismatch when kv heads do not divide heads, or more experts work than there are."""
    for prefix in ("", "swa_"):
        heads = text.integer(f"{prefix}num_attention_heads")
        if heads % text.integer(f"{prefix}num_key_value_heads"):
            raise text.wrong(f"{prefix}num_key_value_heads", f"a divisor of {prefix}num_attention_heads, {heads}")
    experts = text.integer("n_routed_experts")
    if text.integer("num_experts_per_tok") > experts:
        raise text.wrong("num_experts_per_tok", f"at most n_routed_experts, {experts}")
