"""Routed and shared experts. Their widths are spread over ranks; every rank has a slab of every expert."""

import torch
from torch import Tensor

from inkcap.layers.batch import Batch
from inkcap.layers.formats import Grid, Stored, matrices, rounded
from inkcap.layers.linear import prefixed
from inkcap.layers.router import SigmoidRouter, SinkRouter
from inkcap.layers.sconv import ShortConv
from inkcap.ops.act.ref import swiglu
from inkcap.ops.experts.ref import (
    experts_down,
    experts_settle,
    experts_up,
    routed_down,
    routed_settle,
    routed_up,
)
from inkcap.ops.linear.ref import project
from inkcap.ops.quantize.coded import Weights
from inkcap.ops.sconv.ref import sconv
from inkcap.ops.values import Activated, Caps, Normed, Routed
from inkcap.parallel.comm import Comm
from inkcap.parallel.share import Share, split
from inkcap.parallel.slot import Slot

DENSE = Stored()
ALONE = Comm.alone()


class RoutedMatrices:
    """Both matrices of all experts of a layer: w13 with gate and up rows interleaved, split by rows, and w2."""

    def __init__(
        self, experts: int, units: Share, channels: int, stored: Stored, dtype: torch.dtype, device: torch.device
    ) -> None:
        every = Share(0, channels, channels)
        self.up = matrices(stored.w13, Grid(experts, units.times(2), every), dtype, device)
        self.down = matrices(stored.w2, Grid(experts, every, units), dtype, device)

    def slots(self) -> dict[str, Slot]:
        """`w13` [E, 2 I, C] and `w2` [E, C, I], or their codes and scales; see layers/formats.py."""
        return {**self.up.slots("w13"), **self.down.slots("w2")}

    def unpack(self) -> None:
        """Called once the slots are filled."""
        self.up.unpack()
        self.down.unpack()

    def w13(self) -> Weights:
        """[E, 2 I, C]."""
        assert self.up.weights is not None, "w13 is not unpacked yet"
        return self.up.weights

    def w2(self) -> Weights:
        """[E, C, I]."""
        assert self.down.weights is not None, "w2 is not unpacked yet"
        return self.down.weights


class Experts:
    """`router` chooses among `experts` gated MLPs of `units` each; `shared` more of that width serve every token."""

    def __init__(
        self,
        router: SinkRouter,
        channels: int,
        experts: int,
        shared: int,
        units: int,
        comm: Comm,
        dtype: torch.dtype,
        device: torch.device,
        stored: Stored = DENSE,
    ) -> None:
        self.router = router
        self.comm = comm
        self.units = split(units, comm, "width of an expert")
        self.routed = RoutedMatrices(experts, self.units, channels, stored, dtype, device)
        mine = self.units.count
        self.shared_w13 = torch.empty(shared, 2 * mine, channels, dtype=dtype, device=device)
        # the shared down projections are one product with inner size shared * units
        self.shared_w2 = torch.empty(channels, shared, mine, dtype=dtype, device=device)

    def slots(self) -> dict[str, Slot]:
        """`router.*`, `experts.{w13 [E, 2 I, C], w2 [E, C, I]}` and the same two under `shared` for S experts."""
        rows, columns = self.units.times(2), self.units
        shared, channels = len(self.shared_w13), self.shared_w13.shape[2]
        return {
            **prefixed("router", self.router.slots()),
            **prefixed("experts", self.routed.slots()),
            "shared.w13": Slot(self.shared_w13, (shared, rows.whole, channels), dim=1, start=rows.start),
            "shared.w2": Slot(
                self.shared_w2.transpose(0, 1), (shared, channels, columns.whole), dim=2, start=columns.start
            ),
        }

    def __call__(self, rows: Normed) -> Activated:
        """Normed rows [T, C] to the activations of this rank's slab of the chosen and the shared experts."""
        return experts_up(rows, self.router(rows), self.routed.w13(), self.shared_w13)

    def settle(
        self, rows: Activated, residual: Tensor | None, conv: ShortConv, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """residual + conv(sum over experts) and its sums of squares, as `ops.experts_settle`."""
        view = batch.view("sconv")
        if self.comm.size == 1:
            return experts_settle(
                rows, self.routed.w2(), self.shared_w2, residual, conv.taps, view, batch.packing, plane=conv.plane
            )
        product = self.comm.all_reduce(experts_down(rows, self.routed.w2(), self.shared_w2))
        return sconv(product, conv.taps, view, batch.packing, plane=conv.plane, residual=residual), None


class RoundedExperts(Experts):
    """The same with reference numerics: both products of the routed experts see activations rounded as their format
    wants it. The router and the shared experts, which are stored dense, never do.
    """

    def __call__(self, rows: Normed) -> Activated:
        """As `Experts`; the halves are separate, since they see other rows."""
        route = self.router(rows)
        own = rows.replaced(rounded(rows.tensor(), self.routed.up.rounding, ALONE))  # every rank has all of each row
        act = routed_up(own, route, self.routed.w13(), None)
        shared = project(rows, self.shared_w13.flatten(0, 1)).unflatten(1, (len(self.shared_w13), -1))
        return Activated(rounded(act, self.routed.down.rounding, self.comm), swiglu(shared, route.gammas), route)


class RoutedExperts:
    """`router` chooses among `experts` gated MLPs of `units` each, whose activation has soft caps; none is shared."""

    def __init__(
        self,
        router: SigmoidRouter,
        channels: int,
        experts: int,
        units: int,
        caps: Caps,
        comm: Comm,
        dtype: torch.dtype,
        device: torch.device,
        stored: Stored = DENSE,
    ) -> None:
        self.router = router
        self.caps = caps
        self.comm = comm
        units_here = split(units, comm, "width of an expert")
        self.routed = RoutedMatrices(experts, units_here, channels, stored, dtype, device)

    def slots(self) -> dict[str, Slot]:
        """`router.*`, `experts.w13` [E, 2 I, C] and `experts.w2` [E, C, I]."""
        return {**prefixed("router", self.router.slots()), **prefixed("experts", self.routed.slots())}

    def __call__(self, rows: Normed) -> tuple[Tensor, Routed]:
        """Normed rows [T, C] to the activations [T, K, this rank's units] of the chosen experts, and the choice."""
        route = self.router(rows)
        return routed_up(rows, route, self.routed.w13(), self.caps), route

    def settle(
        self,
        rows: tuple[Tensor, Routed],
        residual: Tensor | None,
        conv: ShortConv,
        batch: Batch,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """residual + conv(sum over experts) and its sums of squares, as `ops.routed_settle`."""
        act, route = rows
        view = batch.view("sconv")
        if self.comm.size == 1:
            return routed_settle(
                act,
                route,
                self.routed.w2(),
                residual,
                conv.taps,
                view,
                batch.packing,
                plane=conv.plane,
                conv_scale=conv.scale,
                dtype=dtype,
            )
        product = self.comm.all_reduce(routed_down(act, route, self.routed.w2()))
        settled = sconv(
            product,
            conv.taps,
            view,
            batch.packing,
            plane=conv.plane,
            scale=conv.scale,
            residual=residual,
            dtype=dtype,
        )
        return settled, None


class RoundedRoutedExperts(RoutedExperts):
    """The same with reference numerics: both products see activations rounded as their format wants it."""

    def __call__(self, rows: Normed) -> tuple[Tensor, Routed]:
        """As `RoutedExperts`."""
        how = self.routed.up.rounding
        if how is None:
            act, route = super().__call__(rows)
        else:
            route, own = self.router.rounding(rows, how)
            act = routed_up(rows.replaced(own), route, self.routed.w13(), self.caps)
        return rounded(act, self.routed.down.rounding, self.comm), route
