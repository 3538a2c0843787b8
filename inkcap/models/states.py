"""What the layers of either generation keep between steps. No torch."""

from collections.abc import Iterable
from dataclasses import dataclass

from inkcap.cache.state import LayerState, Plane
from inkcap.parallel.share import Place, split_or_repeat

KV_BLOCK = 64  # tokens
CONV_BLOCK = 4  # tokens


@dataclass(frozen=True)
class AttentionSize:
    """The heads of one layer, on all ranks together, and how far they see."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None  # tokens, the token itself included; None: everything
    extent: int  # tokens with a bias


def declare(
    visits: Iterable[AttentionSize], channels: int, conv_width: int, place: Place, dtype: str, kv_dtype: str
) -> list[LayerState]:
    """Of each visit: keys and values in `full` or `window`, of `kv_dtype`; four convolution inputs in `sconv`.

    Raises ConfigInvalid when the ranks can neither share the kv heads evenly nor repeat them.
    """
    states = []
    for visit, size in enumerate(visits):
        kv = split_or_repeat(size.kv_heads, place, "number of kv heads").count
        widths = {"k": kv * size.head_dim, "v": kv * size.head_dim, "attn": channels, "mlp": channels}
        states.append(
            LayerState(
                group="full" if size.window is None else "window",
                visit=visit,
                planes=tuple(Plane(name, (kv, size.head_dim), kv_dtype) for name in "kv"),
                window=size.window,
                block=KV_BLOCK,
                reads_own_step=True,
            )
        )
        states.append(
            LayerState(
                group="sconv",
                visit=visit,
                planes=tuple(Plane(name, (width,), dtype) for name, width in widths.items()),
                window=conv_width,
                block=CONV_BLOCK,
                reads_own_step=False,
            )
        )
    return states
