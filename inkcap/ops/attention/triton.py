"""Attention on a GPU: few queries split over keys, many in tiles; a step may have both."""

import functools

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from inkcap.ops import pdl
from inkcap.ops.attention import row, splits
from inkcap.ops.attention.decode import combine_kernel, split_kernel
from inkcap.ops.attention.prefill import shift_kernel, tile_kernel
from inkcap.ops.attention.ref import attention
from inkcap.ops.values import GroupView, Packing, Scores

ROOMY = 200 << 10  # bytes of shared memory of a processor
NOBODY = 1 << 30  # more tokens than a sequence has


@attention.implement("triton", when=lambda device: device.type == "cuda")
def attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    scores: Scores,
    view: GroupView,
    packing: Packing,
    sinks: Tensor | None = None,
    gate: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """`attention` of the reference. Weights of values are rounded to their dtype; the bias is rounded before log
    scaling, not after it too. Sums over keys are split by numbers of tokens and by the longest sequence, so the last
    bits of a result depend on these. Codes are multiplied in fp16, in which they are exact, or in fp32.
    """
    check(q, k, v, r, scores, view, gate)
    heads, kv = q.shape[1], k.shape[1]
    out = torch.empty_like(q, dtype=r.dtype)
    tokens, sequences, widest = len(q), len(packing.rows), packing.widest
    if row.suits(q, k, r, scores, packing, v_scale is not None):
        row.attend(q, k, v, r, out, scores, view, packing, sinks, gate)
    elif splits.whole(tokens, sequences, widest, heads // kv, kv):
        few(q, k, v, r, out, scores, view, packing, sinks, gate, v_scale, widest, NOBODY)
    else:
        if sequences > 1:
            few(q, k, v, r, out, scores, view, packing, sinks, gate, v_scale, splits.FEW, splits.FEW)
        least = splits.FEW + 1 if sequences > 1 else 1
        many(q, k, v, r, out, scores, view, packing, sinks, gate, v_scale, least)
    return out.flatten(1)


def few(
    q, k, v, r, out, scores, view, packing, sinks, gate, v_scale, widest: int, most: int,
    plan: splits.Splits | None = None, early: bool = False,
) -> None:  # fmt: skip
    """Sequences of at most `most` tokens, no more of which than `widest` matter for the layout, unless it is given;
    `early` then says whether programs have one tile of pages that older steps completed."""
    heads, kv, size = q.shape[1], k.shape[1], q.shape[2]
    states, extent = scores.bias.shape
    sequences = len(packing.rows)
    one = widest == 1
    planes, native = coded(view, v_scale)
    words = v_scale is not None and size == padded(size) >= 32 and view.block % splits.KEYS == 0
    crowded = False  # three programs a processor, not two
    if plan is None:
        crowded = words and one and roomy(q.device)
        plan = splits.plan(
            len(q), sequences, widest, packing.reach, heads // kv, kv, extent, scores.window, crowded
        )  # fmt: skip
        early = one and plan.far == 0 and plan.near >= splits.all_tiles(packing.reach, scores.window)
    on = pdl.supported(q.device)
    parts = plan.tiles * kv * plan.total * plan.queries * (heads // kv)
    sums = torch.empty(parts, size, dtype=torch.float32, device=q.device)
    tops = torch.empty(parts, 2, dtype=torch.float32, device=q.device)
    words = words and plan.rows < 64  # products of more take codes from shared memory once more: words would add work
    searched = 1 if one else coarse(sequences, 64)
    keys = splits.KEYS if one else splits.KEYS // 2  # of a tile with bias
    width = triton.next_power_of_2(plan.queries + keys)
    split_kernel[(plan.total, plan.tiles * kv)](
        q, k, v, r, scores.bias, *planes, view.table, packing.starts, packing.rows, packing.first, sums, tops,
        sequences, most, plan.far, plan.near, scores.scale, *growth_of(scores), k.stride(0), r.stride(0),
        *planes[0].stride()[:3], view.table.stride(0),
        heads, kv, size, padded(size), states, padded(states), extent, scores.window or 0, view.block,
        scores.scaling is not None, one, searched, plan.rows, plan.queries, splits.KEYS, keys, width,
        plan.far > 0, early, words, native,
        *splits.stages(plan, early, q.element_size(), roomy(q.device), crowded), on,
        num_warps=4, maxnreg=splits.REGISTERS if crowded and plan.far else None, **pdl.launch(on),
    )  # fmt: skip
    channels = splits.channels(plan.total, padded(size))
    total = triton.next_power_of_2(plan.total) if one else coarse(plan.total, 64)
    combine_kernel[(plan.tiles * plan.queries, heads, triton.cdiv(size, channels))](
        sums, tops, out, q if sinks is None else sinks, q if gate is None else gate,
        tops if v_scale is None else v_scale, packing.starts, packing.first,
        sequences, most, plan.far, plan.near, 0 if sinks is None else sinks.stride(0),
        0 if gate is None else gate.stride(0),
        heads, kv, size, extent, scores.window or 0, one, searched, plan.queries, splits.KEYS, keys,
        plan.far > 0, total, channels, sinks is not None, gate is not None, v_scale is not None, on,
        num_warps=4, **pdl.launch(on),
    )  # fmt: skip


def many(q, k, v, r, out, scores, view, packing, sinks, gate, v_scale, least: int) -> None:
    """Sequences of at least `least` tokens."""
    heads, kv, size = q.shape[1], k.shape[1], q.shape[2]
    states, extent = scores.bias.shape
    sequences = len(packing.rows)
    tiling = splits.tiling(scores.window, q.element_size())
    shift = splits.octets(tiling.rows, heads // kv, extent)
    on, bank = pdl.supported(q.device), scores.bias.new_empty(shift.number * 8, padded(states), shift.pitch)
    shift_kernel[(len(bank), triton.cdiv(shift.pitch, 256))](
        scores.bias, bank, states, padded(states), extent, shift.zero, shift.pitch, 256, on,
        num_warps=4, **pdl.launch(on),
    )  # fmt: skip
    planes, native = coded(view, v_scale)
    tiles = tiles_of(k, v, view.block, planes) if scores.window is None else (None,) * 4
    tile_kernel[(len(q) * heads // kv // tiling.rows + sequences * shift.spare, kv)](
        q, k, v, r, out, bank, q if sinks is None else sinks, q if gate is None else gate,
        q if v_scale is None else v_scale, *planes, *tiles, view.table, packing.starts, packing.rows, packing.first,
        sequences, least, scores.scale, *growth_of(scores), k.stride(0), r.stride(0),
        0 if sinks is None else sinks.stride(0), 0 if gate is None else gate.stride(0), *planes[0].stride()[:3],
        view.table.stride(0),
        heads, kv, size, padded(size), states, padded(states), extent, scores.window or 0, view.block,
        scores.scaling is not None, coarse(sequences, 64), tiling.rows, shift.number, splits.KEYS,
        tiling.near, shift.spare, shift.zero, shift.pitch, q.is_cuda and r.element_size() == 2,
        sinks is not None, gate is not None, tiles[0] is not None, v_scale is not None, native, *tiling.stages, on,
        num_warps=tiling.warps, **pdl.launch(on),
    )  # fmt: skip


def tiles_of(k: Tensor, v: Tensor, block: int, planes: list[Tensor]) -> tuple[TensorDescriptor | None, ...]:
    """Descriptors of the pages of k and v and of this step's; None where the device or the sizes do not allow them."""
    size = k.shape[2]
    steps = [step * k.element_size() for step in (size, k.stride(0))]
    steps += [step * planes[0].element_size() for step in planes[0].stride()[:3]]
    able = (k.device.type == "cpu" or pdl.supported(k.device)) and block % splits.KEYS == 0
    begins = [tensor.data_ptr() for tensor in (k, v, *planes)]
    if not able or size != padded(size) or any(place % 16 for place in steps + begins):
        return (None,) * 4
    return (
        *(TensorDescriptor.from_tensor(plane.transpose(1, 2), [1, 1, splits.KEYS, size]) for plane in planes),
        *(TensorDescriptor.from_tensor(own.flatten(1), [splits.KEYS, size]) for own in (k, v)),
    )


def coded(view: GroupView, v_scale: Tensor | None) -> tuple[list[Tensor], bool]:
    """The planes of k and v, codes as bytes, and whether the device converts these itself (Ada, Hopper and newer)."""
    planes = list(view.planes[:2])
    if v_scale is None:
        return planes, False
    device = planes[0].device
    native = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    return [plane.view(torch.uint8) for plane in planes], native


def check(q: Tensor, k: Tensor, v: Tensor, r: Tensor, scores: Scores, view: GroupView, gate: Tensor | None) -> None:
    """What the kernels take for granted."""
    first, second = view.planes[:2]
    assert first.stride() == second.stride(), f"planes of k and v have strides {first.stride()}, {second.stride()}"
    assert first.stride(3) == 1, f"a plane has stride {first.stride(3)} between channels; the kernel needs 1"
    assert view.table.stride(1) == 1, f"a block table has stride {view.table.stride(1)} between blocks"
    assert q.is_contiguous(), f"queries have strides {q.stride()}; the kernel needs contiguous ones"
    assert k.stride() == v.stride(), f"k and v have strides {k.stride()} and {v.stride()}; the kernel needs equal ones"
    assert k.stride()[1:] == (k.shape[2], 1), f"heads of k have strides {k.stride()}; the kernel needs (D, 1)"
    assert r.stride()[1:] == (r.shape[2], 1), f"relative states have strides {r.stride()}"
    assert scores.bias.is_contiguous(), f"the bias has strides {scores.bias.stride()}; the kernel needs whole rows"
    assert gate is None or gate.stride(1) == 1, f"the gate has stride {gate.stride(1)} between channels"


@functools.cache
def roomy(device: torch.device) -> bool:
    """Whether programs may hold three tiles of keys and values, two programs a processor."""
    return device.type == "cuda" and torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor > ROOMY


def coarse(number: int, least: int) -> int:
    """`least` times a power of 4 that is enough: steps of all kinds need few kernels, each of which takes seconds."""
    return least if number <= least else 4 * coarse(-(-number // 4), least)


def padded(size: int) -> int:
    """Sides of a product: powers of 2, at least 16."""
    return max(16, triton.next_power_of_2(size))


def growth_of(scores: Scores) -> tuple[float, float]:
    """Arguments of `growth`."""
    scaling = scores.scaling
    return (1.0, 0.0) if scaling is None else (float(scaling.floor), float(scaling.alpha))
