"""Linear layers whose rows or columns are spread over ranks.

How weights get in, for every layer of this package: `slots()` maps names to `Slot`s (inkcap/parallel/slot.py), one for
each tensor of the checkpoint, with the tensor's published shape and this rank's part of it. A model's `slots()` is the
union over its layers, named by path: `embed.weight`, `layers.3.attention.k.weight`. Whoever loads turns a checkpoint's
names into these, reads the parts and calls `copy_` on the targets; a slot that nothing filled is a missing tensor.
Parameters are plain tensors, allocated empty: no autograd, no registry, no `state_dict`.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from inkcap.layers.batch import Batch
from inkcap.layers.sconv import ShortConv
from inkcap.ops.linear.ref import product, project, project_each, settle
from inkcap.ops.sconv.ref import sconv
from inkcap.ops.values import Normed
from inkcap.parallel.comm import Comm
from inkcap.parallel.share import Share
from inkcap.parallel.slot import Slot


def prefixed(prefix: str, slots: Mapping[str, Slot]) -> dict[str, Slot]:
    """The same slots under longer names."""
    return {f"{prefix}.{name}": slot for name, slot in slots.items()}


class Columns:
    """One or several matrices that read the same rows, stacked into one product: [q | k | v | r].

    `parts` maps a name to the share of output columns this rank holds of that matrix.
    """

    def __init__(self, inputs: int, parts: Mapping[str, Share], dtype: torch.dtype, device: torch.device) -> None:
        self.inputs = inputs
        self.parts = dict(parts)
        self.widths = [share.count for share in parts.values()]
        self.weight = torch.empty(
            sum(self.widths), inputs, dtype=dtype, device=device
        )  # [columns of all parts, inputs]

    def slots(self) -> dict[str, Slot]:
        """`NAME.weight` for each part, [columns, inputs]."""
        targets = self.weight.split(self.widths)
        return {
            f"{name}.weight": Slot(target, (share.whole, self.inputs), dim=0, start=share.start)
            for (name, share), target in zip(self.parts.items(), targets, strict=True)
        }

    def __call__(self, rows: Normed) -> tuple[Tensor, ...]:
        """Normed rows [T, inputs] to one [T, columns] per part, views of one product."""
        return project(rows, self.weight).split_with_sizes(self.widths, 1)

    def each(self, inputs: Sequence[Normed], counts: Sequence[int]) -> tuple[Tensor, ...]:
        """The same from several inputs, of which the first has the first counts[0] of the parts, and so on."""
        if all(rows is inputs[0] for rows in inputs):
            return self(inputs[0])
        ends = list(accumulate(counts))
        shares = [self.widths[end - count : end] for end, count in zip(ends, counts, strict=True)]
        made = project_each(inputs, self.weight, [sum(widths) for widths in shares])
        parts = (out.split_with_sizes(widths, 1) for out, widths in zip(made, shares, strict=True))
        return tuple(chain.from_iterable(parts))


class Row:
    """A sublayer's last matrix. Each rank multiplies its share of the inputs; the sum over ranks is the product."""

    def __init__(self, inputs: Share, outputs: int, comm: Comm, dtype: torch.dtype, device: torch.device) -> None:
        self.inputs = inputs
        self.comm = comm
        self.weight = torch.empty(outputs, inputs.count, dtype=dtype, device=device)

    def slots(self) -> dict[str, Slot]:
        """`weight` [outputs, inputs]."""
        whole = (len(self.weight), self.inputs.whole)
        return {"weight": Slot(self.weight, whole, dim=1, start=self.inputs.start)}

    def settle(
        self,
        rows: Tensor,
        residual: Tensor | None,
        conv: ShortConv,
        batch: Batch,
        scale: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """residual + conv(product of rows [T, this rank's inputs] * scale) and its sums of squares, as `ops.settle`."""
        view = batch.view("sconv")
        if self.comm.size == 1:
            return settle(
                rows,
                self.weight,
                residual,
                conv.taps,
                view,
                batch.packing,
                plane=conv.plane,
                scale=scale,
                conv_scale=conv.scale,
                dtype=dtype,
            )
        summed = self.comm.all_reduce(product(rows, self.weight))
        if scale is not None:
            summed = (summed.float() * scale).to(summed.dtype)
        settled = sconv(
            summed,
            conv.taps,
            view,
            batch.packing,
            plane=conv.plane,
            scale=conv.scale,
            residual=residual,
            dtype=dtype,
        )
        return settled, None
