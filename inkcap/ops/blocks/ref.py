"""Copies of whole cache blocks."""

from torch import Tensor

from inkcap.ops.dispatch import op


@op
def copy_blocks(arena: Tensor, source: Tensor, target: Tensor) -> None:
    """arena[target[i]] = arena[source[i]] for each i. arena: [blocks, ...]; source, target: [N] int64.

    Every source is read before any target is written; targets are distinct.
    """
    arena[target] = arena[source]
