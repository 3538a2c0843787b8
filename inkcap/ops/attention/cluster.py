"""Attention of one token over few keys: a cluster of eight programs a kv head, whose sums meet in shared memory.

A program has an eighth of the keys, a warp of it 16 of them, in the lanes that multiply them on tensor cores before
this step's queries are there. Behind the dependency wait no keys move: logits, weights, sums, and an exchange of these,
after which each program finishes one head, this step's own key included. Written in Gluon, which is compiled, not
interpreted: CI compiles it, a device compares it.
"""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from inkcap.ops import pdl
from inkcap.ops.experts.ring import RENAMED, copy_rows, everybody
from inkcap.ops.values import GroupView, Packing, Scores

LOG2E = gl.constexpr(1.4426950408889634)
HIDDEN = gl.constexpr(-1.0e30)
PROGRAMS = gl.constexpr(8)  # of a cluster, and most heads of a kv head
HEAD = gl.constexpr(128)  # channels
# shared memory of a program: eight sums of a head, their maxima and totals, a barrier that counts these bytes
BOARD = gl.constexpr("""{
.shared .align 16 .b8 board[4168];
.reg .pred p; .reg .b32 t;
mov.u32 $0, board;
mov.u32 t, %tid.x;
setp.eq.u32 p, t, 0;
@p mbarrier.init.shared::cta.b64 [$0+4160], 1;
@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0+4160], 4160;
@p fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.relaxed.aligned;
}""")
# all programs of the cluster have their barriers
MEET = gl.constexpr("barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;")
# a word to an address of another program, if the last operand is not 0
POST = gl.constexpr("""{
.reg .b32 a, b; .reg .pred p;
setp.ne.u32 p, $5, 0;
mapa.shared::cluster.u32 a, $1, $3;
add.u32 b, $2, 4160;
mapa.shared::cluster.u32 b, b, $3;
@p st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [a], $4, [b];
mov.u32 $0, 0;
}""")
ARRIVED = gl.constexpr("""{
.reg .pred p;
again:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [$1+4160], 0;
@!p bra again;
mov.u32 $0, 0;
}""")
# Triton would let one program of a cluster store what all of them have
PUT = gl.constexpr("""{
.reg .pred p;
setp.lt.s32 p, $3, $4;
@p st.global.b16 [$1], $2;
mov.u32 $0, 0;
}""")


@gluon.jit
def seen_as(memory, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory in another shape; versions of Triton name it differently."""
    if RENAMED:
        other = memory.reinterpret(memory.dtype, shape, layout)
    else:
        other = memory._reinterpret(memory.dtype, shape, layout)
    return other


@gluon.jit
def growth(position, floor, alpha):
    """1 + alpha * ln(max(1, (p + 1) / floor)), fp32."""
    return 1.0 + alpha * gl.log(gl.maximum((position + 1).to(gl.float32) / floor, 1.0))


@gluon.jit
def cluster_kernel(
    q, k, v, r, bias, k_plane, v_plane, table, rows, first_of, out, sinks, gate,
    scale, floor, alpha, s_k, s_r, s_sinks, s_gate, s_block, s_token, s_head, s_table,
    HEADS: gl.constexpr, KV: gl.constexpr, STATES: gl.constexpr, EXTENT: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK: gl.constexpr, SCALED: gl.constexpr, SINKS: gl.constexpr, GATE: gl.constexpr, GROUPS: gl.constexpr,
    KEYS: gl.constexpr, QUERIES: gl.constexpr, NEAR: gl.constexpr, STATED: gl.constexpr, COPY: gl.constexpr,
    VALUES: gl.constexpr, PLAIN: gl.constexpr, SUMS: gl.constexpr, GATHERED: gl.constexpr,
    LINE: gl.constexpr, STATE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One kv head of one sequence. Program i of the cluster has keys i * BN .. from the oldest visible one on, and
    finishes head i."""
    G: gl.constexpr = HEADS // KV
    BN: gl.constexpr = 16 * GROUPS
    pdl.trigger(PDL)
    rank = gl.inline_asm_elementwise("mov.u32 $0, %cluster_ctarank;", "=r", [], gl.int32, is_pure=False, pack=1)
    board = gl.inline_asm_elementwise(BOARD, "=r", [], gl.int32, is_pure=False, pack=1)
    i = gl.program_id(0) // KV
    head = gl.program_id(0) % KV
    first = gl.load(first_of + i)
    pages = table + gl.load(rows + i).to(gl.int64) * s_table
    low = first * 0
    if WINDOW > 0:
        low = gl.maximum(first - WINDOW + 1, 0)
    begin = low + rank * BN
    k_plane += head * s_head
    v_plane += head * s_head

    values = gl.allocate_shared_memory(v_plane.dtype.element_ty, [GROUPS, 16, HEAD], VALUES)
    at = begin + gl.arange(0, BN, layout=gl.SliceLayout(1, KEYS))
    channel = gl.arange(0, HEAD, layout=gl.SliceLayout(0, KEYS))
    page = gl.load(pages + at // BLOCK, mask=at < first, other=0).to(gl.int64)
    address = page * s_block + (at % BLOCK) * s_token
    keys = gl.load(k_plane + address[:, None] + channel[None, :], mask=(at < first)[:, None], other=0.0)
    channel = gl.arange(0, HEAD, layout=gl.SliceLayout(0, COPY))
    sources = ()
    for n in gl.static_range(GROUPS):
        at = begin + 16 * n + gl.arange(0, 16, layout=gl.SliceLayout(1, COPY))
        page = gl.load(pages + at // BLOCK, mask=at < first, other=0).to(gl.int64)
        sources += (v_plane + (page * s_block + (at % BLOCK) * s_token)[:, None] + channel[None, :],)
    for n in gl.static_range(GROUPS):
        at = begin + 16 * n + gl.arange(0, 16, layout=gl.SliceLayout(1, COPY))
        copy_rows(values.index(n), sources[n], mask=(at < first)[:, None])
    async_copy.commit_group()
    distance = first - begin - gl.arange(0, BN, layout=gl.SliceLayout(1, NEAR))
    state = gl.arange(0, 16, layout=gl.SliceLayout(0, NEAR))
    there = ((distance > 0) & (distance < EXTENT))[:, None] & (state < STATES)[None, :]
    near = gl.load(bias + state[None, :] * EXTENT + distance[:, None], mask=there, other=0.0)
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    near = gl.convert_layout(near, A)
    keys = gl.convert_layout(keys, gl.DotOperandLayout(0, SUMS, 8))
    grown = LOG2E
    if SCALED:
        grown = LOG2E * growth(first, floor, alpha)
    seen = begin + gl.arange(0, BN, layout=gl.SliceLayout(1, SUMS)) < first
    # of this program's head
    mine = gl.minimum(rank, G - 1) + head * G
    line = gl.arange(0, HEAD, layout=LINE)
    put = gl.arange(0, HEAD, layout=gl.SliceLayout(0, GATHERED))
    few = gl.arange(0, 16, layout=STATE)
    nearest = gl.load(bias + few * EXTENT, mask=few < STATES, other=0.0).to(gl.float32)
    async_copy.wait_group(0)
    everybody()
    gl.inline_asm_elementwise(MEET, "=r", [], gl.int32, is_pure=False, pack=1)

    pdl.wait(PDL)
    member = gl.arange(0, 8, layout=gl.SliceLayout(1, QUERIES))
    channel = gl.arange(0, HEAD, layout=gl.SliceLayout(0, QUERIES))
    own = q + (i.to(gl.int64) * HEADS + head * G) * HEAD
    queries = gl.load(own + member[:, None] * HEAD + channel[None, :], mask=(member < G)[:, None], other=0.0)
    member = gl.arange(0, 8, layout=gl.SliceLayout(1, STATED))
    state = gl.arange(0, 16, layout=gl.SliceLayout(0, STATED))
    own = r + i.to(gl.int64) * s_r + head * (G * STATES)
    there = (member < G)[:, None] & (state < STATES)[None, :]
    stated = gl.load(own + member[:, None] * STATES + state[None, :], mask=there, other=0.0)
    own_q = gl.load(q + (i.to(gl.int64) * HEADS + mine) * HEAD + line).to(gl.float32)
    own_k = gl.load(k + i.to(gl.int64) * s_k + head * HEAD + line).to(gl.float32)
    own_r = gl.load(r + i.to(gl.int64) * s_r + mine * STATES + few, mask=few < STATES, other=0.0).to(gl.float32)
    own_v = gl.load(v + i.to(gl.int64) * s_k + head * HEAD + put).to(gl.float32)
    if SINKS:
        sink = gl.load(sinks + i.to(gl.int64) * s_sinks + mine).to(gl.float32) * LOG2E
    if GATE:
        gated = gl.load(gate + i.to(gl.int64) * s_gate + mine * HEAD + put).to(gl.float32)

    pdl.wait(PDL)  # for nothing: all loads are on their way before the first is used
    queries = gl.convert_layout(gl.permute(queries, (1, 0)), gl.DotOperandLayout(1, SUMS, 8))
    stated = gl.convert_layout(gl.permute(stated, (1, 0)), B)
    zeros = gl.zeros([BN, 8], gl.float32, SUMS)
    z = mma_v2(keys, queries, zeros) * (scale * LOG2E)
    z += mma_v2(near, stated, zeros).to(r.dtype.element_ty).to(gl.float32) * grown
    z = gl.where(seen[:, None], z, HIDDEN)
    z = gl.reshape(z, [GROUPS, 16, 8])
    top = gl.max(z, 1)
    held = ()
    for n in gl.static_range(GROUPS):
        held += (values.index(n).permute((1, 0)).load(A),)
    p = gl.exp2(z - gl.expand_dims(top, 1))
    total = gl.sum(p, 1)
    tops = gl.allocate_shared_memory(gl.float32, [GROUPS, 8], PLAIN)
    totals = gl.allocate_shared_memory(gl.float32, [GROUPS, 8], PLAIN)
    weights = gl.allocate_shared_memory(v_plane.dtype.element_ty, [BN, 8], PLAIN)
    weights.store(gl.convert_layout(gl.reshape(p, [BN, 8]).to(v_plane.dtype.element_ty), SUMS))
    tops.store(top)
    totals.store(total)
    everybody()
    values._keep_alive()  # else the others take its place, behind a barrier
    weights = seen_as(weights, [GROUPS, 16, 8], PLAIN)
    tops = seen_as(tops, [GROUPS, 1, 8], PLAIN)
    totals = seen_as(totals, [GROUPS, 1, 8], PLAIN)
    parts = ()
    most = gl.full([1, 8], HIDDEN, gl.float32, SUMS)
    zeros = gl.zeros([HEAD, 8], gl.float32, SUMS)
    acc = zeros
    total = gl.zeros([1, 8], gl.float32, SUMS)
    products = ()
    for n in gl.static_range(GROUPS):
        parts += (tops.index(n).load(SUMS),)
        most = gl.maximum(most, parts[n])
        products += (mma_v2(held[n], weights.index(n).load(B), zeros),)
    for n in gl.static_range(GROUPS):
        factor = gl.exp2(parts[n] - most)
        acc += products[n] * factor
        total += totals.index(n).load(SUMS) * factor

    # head h of the sums to program h
    channel = gl.arange(0, HEAD, layout=gl.SliceLayout(1, SUMS))[:, None]
    to = gl.arange(0, 8, layout=gl.SliceLayout(0, SUMS))[None, :]
    channel, to = gl.broadcast(channel, to)
    place = board + (rank * HEAD + channel) * 4
    gl.inline_asm_elementwise(
        POST, "=r,r,r,r,r,r", [place, board, to, acc.to(gl.int32, bitcast=True), (to < G).to(gl.int32)], gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
    place = board + PROGRAMS * HEAD * 4 + rank * 8 + channel * 4
    both = gl.where(channel == 0, gl.broadcast(most, acc)[0], gl.broadcast(total, acc)[0])
    gl.inline_asm_elementwise(
        POST, "=r,r,r,r,r,r",
        [place, board, to, both.to(gl.int32, bitcast=True), ((channel < 2) & (to < G)).to(gl.int32)], gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
    if rank >= G:
        return
    # this step's own key, while the others arrive
    logit = gl.sum(own_q * own_k, 0) * (scale * LOG2E)
    logit += gl.sum(own_r * nearest, 0).to(r.dtype.element_ty).to(gl.float32) * grown
    gl.inline_asm_elementwise(ARRIVED, "=r,r", [board], gl.int32, is_pure=False, pack=1)
    part = gl.arange(0, PROGRAMS, layout=gl.SliceLayout(1, GATHERED))
    top = gl.inline_asm_elementwise(
        "ld.shared.f32 $0, [$1];", "=f,r", [board + PROGRAMS * HEAD * 4 + part * 8], gl.float32, is_pure=False, pack=1
    )
    total = gl.inline_asm_elementwise(
        "ld.shared.f32 $0, [$1];", "=f,r", [board + PROGRAMS * HEAD * 4 + 4 + part * 8], gl.float32,
        is_pure=False, pack=1,
    )  # fmt: skip
    acc = gl.inline_asm_elementwise(
        "ld.shared.f32 $0, [$1];", "=f,r", [board + (part[:, None] * HEAD + put[None, :]) * 4], gl.float32,
        is_pure=False, pack=1,
    )  # fmt: skip
    most = gl.maximum(gl.max(top, 0), logit)
    if SINKS:
        most = gl.maximum(most, sink)
    factor = gl.exp2(top - most)
    p = gl.exp2(logit - most)
    total = gl.sum(total * factor, 0) + p
    if SINKS:
        total += gl.exp2(sink - most)
    y = (gl.sum(acc * factor[:, None], 0) + p * own_v) / total
    if GATE:
        y = y / (1.0 + gl.exp2(-gated * LOG2E))
    to = out + (i.to(gl.int64) * HEADS + mine) * HEAD + put
    gl.inline_asm_elementwise(
        PUT, "=r,l,h,r,r", [to.to(gl.int64), y.to(out.dtype.element_ty).to(gl.int16, bitcast=True), rank, G], gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@functools.cache
def layouts(warps: int) -> tuple:
    """Lane 4 l + t has, of a product of 16 rows, rows l and l + 8; see the kernel for what each is of."""
    none = [[0, 0]] * 3
    warp = range((warps - 1).bit_length())
    same = [[0, 0] for _ in warp]

    def linear(registers, lanes, of_warps, shape, blocks=none):
        return gl.DistributedLinearLayout(registers, lanes, of_warps, blocks, shape)

    own, keys = [[16 << n, 0] for n in warp], 16 * warps
    eight, line = [[0, 1], [0, 2], [0, 4]], [[1, 0], [2, 0], [4, 0]]
    sums = gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8], none)
    across = [[0, 32 << n] if n < 2 else [0, 0] for n in warp]
    lanes = [[0, 1 << n] for n in range(5)]
    return (
        linear([*eight, [0, 32], [0, 64], [8, 0]], [[0, 8], [0, 16], *line], own, [keys, 128]),
        linear([*eight, [0, 32], [0, 64]], [[0, 8], [0, 16], *line], same, [8, 128]),
        linear([[0, 1], [0, 8], [8, 0]], [[0, 2], [0, 4], *line], own, [keys, 16]),
        linear([[0, 1], [0, 8]], [[0, 2], [0, 4], *line], same, [8, 16]),
        linear(
            [*eight, *([[8, 0]] if warps == 4 else [])],
            [[0, 8], [0, 16], [0, 32], [0, 64], [1, 0]],
            [[2 << n, 0] for n in warp],
            [16, 128],
        ),
        gl.SwizzledSharedLayout(8, 1, 8, [1, 0], none),
        gl.SwizzledSharedLayout(1, 1, 1, [1, 0], none),
        sums,
        linear(line, lanes, across, [8, 128]),
        gl.DistributedLinearLayout([[1], [2]], [[4], [8], [16], [32], [64]], [[0] for _ in warp], [[0]] * 3, [128]),
        gl.DistributedLinearLayout([], [[1], [2], [4], [8], [0]], [[0] for _ in warp], [[0]] * 3, [16]),
    )


def warps_of(reach: int, window: int | None) -> int:
    """Warps of a program, 16 keys each, for a sequence of up to `reach` tokens; 0 where there are too many keys."""
    keys = reach - 1 if window is None else min(reach, window) - 1
    return next((warps for warps in (4, 8) if keys <= 16 * warps * PROGRAMS.value), 0)


def suits(q: Tensor, k: Tensor, r: Tensor, scores: Scores, packing: Packing, v_scale: Tensor | None) -> bool:
    """Whether this kernel is made for a step: one token over few keys. More sequences were not measured."""
    (tokens, heads, size), kv = q.shape, k.shape[1]
    return (
        pdl.supported(q.device)
        and tokens == 1
        and q.dtype == k.dtype == r.dtype == torch.bfloat16
        and v_scale is None
        and size == HEAD.value
        and heads // kv <= PROGRAMS.value
        and scores.bias.shape[0] <= 16
        and warps_of(packing.reach, scores.window) > 0
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    out: Tensor,
    scores: Scores,
    view: GroupView,
    packing: Packing,
    sinks: Tensor | None,
    gate: Tensor | None,
) -> None:
    """Launch the kernel for one token a sequence; the result goes into out [T, heads, D]."""
    (_, heads, _), kv, (states, extent) = q.shape, k.shape[1], scores.bias.shape
    warps = warps_of(packing.reach, scores.window)
    scaling, planes = scores.scaling, view.planes[:2]
    cluster_kernel[(len(q) * kv,)](
        q, k, v, r, scores.bias, *planes, view.table, packing.rows, packing.first, out,
        q if sinks is None else sinks, q if gate is None else gate,
        scores.scale, *((1.0, 0.0) if scaling is None else (float(scaling.floor), float(scaling.alpha))),
        k.stride(0), r.stride(0), 0 if sinks is None else sinks.stride(0), 0 if gate is None else gate.stride(0),
        *planes[0].stride()[:3], view.table.stride(0),
        heads, kv, states, extent, scores.window or 0, view.block, scaling is not None, sinks is not None,
        gate is not None, warps, *layouts(warps), True,
        num_warps=warps, num_ctas=PROGRAMS.value, **pdl.launch(True),
    )  # fmt: skip
