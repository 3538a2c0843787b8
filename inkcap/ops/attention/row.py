"""Attention of one token over few keys in one launch: programs share the keys of a kv head, some of them sum up.

A warp has 16 keys in the lanes that multiply them on tensor cores, values too, before this step's queries are there.
Behind the dependency wait no keys move: logits, weights, sums. These are posted through memory, in words that are EMPTY
until then, so that whoever wants them sees when they are there: no second launch, no barrier, no fence. The first
programs of a kv head finish one query head each, this step's own key included. Written in Gluon, which is compiled, not
interpreted: CI compiles it, a device compares it.
"""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from inkcap.ops import pdl
from inkcap.ops.gluon import everybody, seen_as
from inkcap.ops.letters import box_of
from inkcap.ops.values import GroupView, Packing, Scores

GROUP = 8  # most heads of a kv head: columns of a product
LOG2E = gl.constexpr(1.4426950408889634)
HIDDEN = gl.constexpr(-1.0e30)
HEAD = gl.constexpr(128)  # channels
EMPTY = gl.constexpr(-1)  # as a float a NaN that no arithmetic makes


@gluon.jit
def growth(position, floor, alpha):
    """1 + alpha * ln(max(1, (p + 1) / floor)), fp32."""
    return 1.0 + alpha * gl.log(gl.maximum((position + 1).to(gl.float32) / floor, 1.0))


@gluon.jit
def fragments(x, W: gl.constexpr, A: gl.constexpr):
    """Values [16, channels] as rows of a product: a lane has neighbouring channels, the product's rows are apart."""
    REPS: gl.constexpr = HEAD // (16 * W)
    x = gl.reshape(gl.permute(x, (1, 0)), [W, 8, REPS, 2, 16])
    return gl.convert_layout(gl.reshape(gl.permute(x, (2, 0, 3, 1, 4)), [HEAD, 16]), A)


@gluon.jit
def addresses(at, begun, of_pages, s_token, BLOCK: gl.constexpr):
    """Of positions, from page `begun` on, whose addresses and those of the next ones are `of_pages`."""
    address = of_pages[0] + (at % BLOCK) * s_token
    for n in gl.static_range(1, len(of_pages)):
        address = gl.where(at // BLOCK >= begun + n, of_pages[n] + (at % BLOCK) * s_token, address)
    return address


@gluon.jit
def straight(x, W: gl.constexpr):
    """Rows of such a product [channels, 8] back in their order: [8, channels]."""
    REPS: gl.constexpr = HEAD // (16 * W)
    x = gl.permute(gl.reshape(x, [REPS, W, 2, 8, 8]), (1, 3, 0, 2, 4))
    return gl.permute(gl.reshape(x, [HEAD, 8]), (1, 0))


@gluon.jit
def row_kernel(
    q, k, v, r, bias, k_plane, v_plane, table, rows, first_of, out, sinks, gate, letters,
    scale, floor, alpha, s_k, s_r, s_sinks, s_gate, s_block, s_token, s_head, s_table,
    HEADS: gl.constexpr, KV: gl.constexpr, STATES: gl.constexpr, EXTENT: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK: gl.constexpr, SCALED: gl.constexpr, SINKS: gl.constexpr, GATE: gl.constexpr, PARTS: gl.constexpr,
    W: gl.constexpr, POLL: gl.constexpr, OPERANDS: gl.constexpr,
    KEYS: gl.constexpr, VALUES: gl.constexpr, QUERIES: gl.constexpr, NEAR: gl.constexpr, STATED: gl.constexpr,
    SUMS: gl.constexpr, POSTED: gl.constexpr, WEIGHTS: gl.constexpr, LINE: gl.constexpr, STATE: gl.constexpr,
    PUT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program [n, i * KV + head]: keys n * BN .. from the oldest visible one on; head n of this kv head's is finished
    by it. letters [.., 8, PARTS, HEAD], and behind all of these [.., 8, PARTS, 2]."""
    G: gl.constexpr = HEADS // KV
    BN: gl.constexpr = 16 * W
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    pdl.trigger(PDL)
    rank = gl.program_id(0)
    i = gl.program_id(1) // KV
    head = gl.program_id(1) % KV
    first = gl.load(first_of + i)
    pages = table + gl.load(rows + i).to(gl.int64) * s_table
    low = first * 0
    if WINDOW > 0:
        low = gl.maximum(first - WINDOW + 1, 0)
    begin = low + rank * BN
    begun = begin // BLOCK
    of_pages = ()
    for n in gl.static_range((BN - 1) // BLOCK + 2):
        page = gl.load(pages + begun + n, mask=(begun + n) * BLOCK < first, other=0)
        of_pages += (page.to(gl.int64) * s_block,)
    k_plane += head * s_head
    v_plane += head * s_head
    at = begin + gl.arange(0, BN, layout=gl.SliceLayout(1, KEYS))
    channel = gl.arange(0, HEAD, layout=gl.SliceLayout(0, KEYS))
    address = addresses(at, begun, of_pages, s_token, BLOCK)
    keys = gl.load(k_plane + address[:, None] + channel[None, :], mask=(at < first)[:, None], other=0.0)
    channel = gl.arange(0, HEAD, layout=gl.SliceLayout(0, VALUES))
    held = ()
    for n in gl.static_range(W):
        at = begin + 16 * n + gl.arange(0, 16, layout=gl.SliceLayout(1, VALUES))
        address = addresses(at, begun, of_pages, s_token, BLOCK)
        held += (gl.load(v_plane + address[:, None] + channel[None, :], mask=(at < first)[:, None], other=0.0),)
    distance = first - begin - gl.arange(0, BN, layout=gl.SliceLayout(1, NEAR))
    state = gl.arange(0, 16, layout=gl.SliceLayout(0, NEAR))
    there = ((distance > 0) & (distance < EXTENT))[:, None] & (state < STATES)[None, :]
    near = gl.load(bias + state[None, :] * EXTENT + distance[:, None], mask=there, other=0.0)
    near = gl.convert_layout(near, A)
    keys = gl.convert_layout(keys, gl.DotOperandLayout(0, SUMS, 8))
    seen = begin + gl.arange(0, BN, layout=gl.SliceLayout(1, SUMS)) < first
    grown = LOG2E
    if SCALED:
        grown = LOG2E * growth(first, floor, alpha)
    mine = gl.minimum(rank, G - 1) + head * G  # the head it finishes
    line = gl.arange(0, HEAD, layout=LINE)
    put = gl.arange(0, HEAD, layout=PUT)
    few = gl.arange(0, 16, layout=STATE)
    nearest = gl.load(bias + few * EXTENT, mask=few < STATES, other=0.0).to(gl.float32)
    sources = ()
    for n in gl.static_range(W):
        sources += (fragments(held[n], W, A),)

    pdl.wait(PDL)
    member = gl.arange(0, 8, layout=gl.SliceLayout(1, QUERIES))
    channel = gl.arange(0, HEAD, layout=gl.SliceLayout(0, QUERIES))
    q += i.to(gl.int64) * (HEADS * HEAD)
    r += i.to(gl.int64) * s_r
    queries = gl.load(
        q + head * (G * HEAD) + member[:, None] * HEAD + channel[None, :], mask=(member < G)[:, None], other=0.0
    )  # fmt: skip
    member = gl.arange(0, 8, layout=gl.SliceLayout(1, STATED))
    state = gl.arange(0, 16, layout=gl.SliceLayout(0, STATED))
    there = (member < G)[:, None] & (state < STATES)[None, :]
    stated = gl.load(r + head * (G * STATES) + member[:, None] * STATES + state[None, :], mask=there, other=0.0)
    k += i.to(gl.int64) * s_k + head * HEAD
    v += i.to(gl.int64) * s_k + head * HEAD
    own_q = gl.load(q + mine * HEAD + line).to(gl.float32)
    own_k = gl.load(k + line).to(gl.float32)
    own_r = gl.load(r + mine * STATES + few, mask=few < STATES, other=0.0).to(gl.float32)
    own_v = gl.load(v + put).to(gl.float32)
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
    z = gl.reshape(gl.where(seen[:, None], z, HIDDEN), [W, 16, 8])
    top = gl.max(z, 1)
    p = gl.exp2(z - gl.expand_dims(top, 1))
    total = gl.sum(p, 1)
    tops = gl.allocate_shared_memory(gl.float32, [W, 8], WEIGHTS)
    totals = gl.allocate_shared_memory(gl.float32, [W, 8], WEIGHTS)
    weights = gl.allocate_shared_memory(v_plane.dtype.element_ty, [BN, 8], WEIGHTS)
    weights.store(gl.convert_layout(gl.reshape(p, [BN, 8]).to(v_plane.dtype.element_ty), SUMS))
    tops.store(top)
    totals.store(total)
    everybody()
    weights = seen_as(weights, weights.dtype, [W, 16, 8], WEIGHTS)
    tops = seen_as(tops, gl.float32, [W, 1, 8], WEIGHTS)
    totals = seen_as(totals, gl.float32, [W, 1, 8], WEIGHTS)
    most = gl.full([1, 8], HIDDEN, gl.float32, SUMS)
    zeros = gl.zeros([HEAD, 8], gl.float32, SUMS)
    highest, products = (), ()
    for n in gl.static_range(W):
        highest += (tops.index(n).load(SUMS),)
        most = gl.maximum(most, highest[n])
        products += (mma_v2(sources[n], weights.index(n).load(B), zeros),)
    acc = zeros
    total = gl.zeros([1, 8], gl.float32, SUMS)
    for n in gl.static_range(W):
        factor = gl.exp2(highest[n] - most)
        acc += products[n] * factor
        total += totals.index(n).load(SUMS) * factor

    acc = gl.convert_layout(straight(acc, W), POSTED)
    member = gl.arange(0, 8, layout=gl.SliceLayout(1, POSTED))
    channel = gl.arange(0, HEAD, layout=gl.SliceLayout(0, POSTED))
    pair = gl.program_id(1) * 8
    ends = letters + gl.num_programs(1) * (8 * PARTS * HEAD)
    to = letters + ((pair + member) * PARTS + rank)[:, None] * HEAD + channel[None, :]
    gl.store(to, acc, mask=(member < G)[:, None])
    both = gl.reshape(gl.join(most, total), [8, 2])
    ENDS: gl.constexpr = both.type.layout
    member = gl.arange(0, 8, layout=gl.SliceLayout(1, ENDS))
    which = gl.arange(0, 2, layout=gl.SliceLayout(0, ENDS))
    gl.store(ends + ((pair + member) * PARTS + rank)[:, None] * 2 + which[None, :], both, mask=(member < G)[:, None])
    if rank >= G:
        return

    # this step's own key, while the letters are on their way
    logit = gl.sum(own_q * own_k, 0) * (scale * LOG2E)
    logit += gl.sum(own_r * nearest, 0).to(r.dtype.element_ty).to(gl.float32) * grown
    letters += (pair + rank) * (PARTS * HEAD) + put
    ends += (pair + rank) * (PARTS * 2) + put * 0
    found = gl.inline_asm_elementwise(
        POLL, OPERANDS, [letters.to(gl.int64), ends.to(gl.int64)], (gl.float32,) * (3 * PARTS), is_pure=False, pack=1
    )  # fmt: skip
    most = gl.maximum(gl.full([HEAD], HIDDEN, gl.float32, PUT), logit)
    if SINKS:
        most = gl.maximum(most, sink)
    for n in gl.static_range(PARTS):
        most = gl.maximum(most, found[PARTS + 2 * n])
    p = gl.exp2(logit - most)
    total = p
    y = p * own_v
    if SINKS:
        total += gl.exp2(sink - most)
    for n in gl.static_range(PARTS):
        factor = gl.exp2(found[PARTS + 2 * n] - most)
        y += found[n] * factor
        total += found[PARTS + 2 * n + 1] * factor
    y = y / total
    if GATE:
        y = y / (1.0 + gl.exp2(-gated * LOG2E))
    gl.store(out + (i.to(gl.int64) * HEADS + mine) * HEAD + put, y.to(out.dtype.element_ty))
    everybody()  # has read them all
    for n in gl.static_range(PARTS):
        gl.store(letters.to(gl.pointer_type(gl.int32)) + n * HEAD, gl.full([HEAD], EMPTY, gl.int32, PUT))
    gl.store(ends.to(gl.pointer_type(gl.int32)) + put, gl.full([HEAD], EMPTY, gl.int32, PUT), mask=put < 2 * PARTS)


@functools.cache
def poll(parts: int) -> tuple:
    """PTX that reads one word of each part and the two at its end until none of them is EMPTY, and its operands."""
    number = 3 * parts
    loads = [f"ld.relaxed.gpu.global.b32 ${n}, [${number}+{512 * n}];" for n in range(parts)]
    loads += [
        f"ld.relaxed.gpu.global.v2.b32 {{${parts + 2 * n}, ${parts + 2 * n + 1}}}, [${number + 1}+{8 * n}];"
        for n in range(parts)
    ]
    checks = [f"mov.b32 t, ${n}; setp.eq.or.u32 p, t, 0xffffffff, p;" for n in range(number)]
    text = "{ .reg .pred p; .reg .b32 t; again: setp.ne.u32 p, 0, 0;" + " ".join(loads + checks) + " @p bra again; }"
    return text, ",".join(["=f"] * number + ["l", "l"])


@functools.cache
def layouts(warps: int) -> tuple:
    """Lane 4 l + t has, of a product of 16 rows, rows l and l + 8; see the kernel for what each is of."""
    warp = range((warps - 1).bit_length())
    linear = gl.DistributedLinearLayout
    own, same = [[16 << n, 0] for n in warp], [[0, 0] for _ in warp]
    eight, line = [[0, 1], [0, 2], [0, 4]], [[1, 0], [2, 0], [4, 0]]
    side = 128 // (8 * warps)  # neighbouring channels of a lane
    near = [[0, 1 << n] for n in range((side - 1).bit_length())]
    return (
        linear([*eight, [0, 32], [0, 64], [8, 0]], [[0, 8], [0, 16], *line], own, [], [16 * warps, 128]),
        linear(
            [*near, [1, 0], [8, 0]], [[2, 0], [4, 0], [0, side], [0, 2 * side], [0, 4 * side]],
            [[0, 8 * side << n] for n in warp], [], [16, 128],
        ),
        linear([*eight, [0, 32], [0, 64]], [[0, 8], [0, 16], *line], same, [], [8, 128]),
        linear([[0, 1], [0, 8], [8, 0]], [[0, 2], [0, 4], *line], own, [], [16 * warps, 16]),
        linear([[0, 1], [0, 8]], [[0, 2], [0, 4], *line], same, [], [8, 16]),
        gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8]),
        linear(
            [*near, [1, 0]], [[2, 0], [4, 0], [0, side], [0, 2 * side], [0, 4 * side]],
            [[0, 8 * side << n] for n in warp], [], [8, 128],
        ),
        gl.SwizzledSharedLayout(1, 1, 1, [1, 0]),
        linear([[1], [2]], [[4], [8], [16], [32], [64]], [[0] for _ in warp], [], [128]),
        linear([], [[1], [2], [4], [8], [0]], [[0] for _ in warp], [], [16]),
        linear([], [[1], [2], [4], [8], [16]], [[32 << n] if n < 2 else [0] for n in warp], [], [128]),
    )  # fmt: skip


PAIRS = 16  # most sequences times kv heads: their programs are on the device at once
TILES = ((512, 8, 4), (1024, 16, 4), (2048, 16, 8))  # most keys; programs that share them, and warps of each
WORDS = PAIRS * GROUP * max(parts for _, parts, _ in TILES) * (HEAD.value + 2)  # letters of the largest launch


def tile(reach: int, window: int | None) -> tuple[int, int]:
    """Programs and warps for sequences of up to `reach` tokens; zeros where there are too many keys."""
    keys = reach - 1 if window is None else min(reach, window) - 1
    return next(((parts, warps) for most, parts, warps in TILES if keys <= most), (0, 0))


def suits(q: Tensor, k: Tensor, r: Tensor, scores: Scores, packing: Packing, coded: bool) -> bool:
    """Whether this kernel is made for a step: single tokens over few keys, no more programs than fit at once."""
    (_, heads, size), kv = q.shape, k.shape[1]
    return (
        pdl.supported(q.device)
        and packing.widest == 1
        and len(q) == len(packing.rows) <= PAIRS // kv
        and q.dtype == r.dtype == torch.bfloat16
        and not coded
        and size == HEAD.value
        and heads // kv <= GROUP
        and scores.bias.shape[0] <= 16
        and tile(packing.reach, scores.window)[0] > 0
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
    parts, warps = tile(packing.reach, scores.window)
    scaling, planes, pairs = scores.scaling, view.planes[:2], len(packing.rows) * kv
    row_kernel[(parts, pairs)](
        q, k, v, r, scores.bias, *planes, view.table, packing.rows, packing.first, out,
        q if sinks is None else sinks, q if gate is None else gate,
        box_of(view.table, WORDS, torch.int32, EMPTY.value).view(torch.float32),
        scores.scale, *((1.0, 0.0) if scaling is None else (float(scaling.floor), float(scaling.alpha))),
        k.stride(0), r.stride(0), 0 if sinks is None else sinks.stride(0), 0 if gate is None else gate.stride(0),
        *planes[0].stride()[:3], view.table.stride(0),
        heads, kv, states, extent, scores.window or 0, view.block, scaling is not None, sinks is not None,
        gate is not None, parts, warps, *poll(parts), *layouts(warps), True,
        num_warps=warps, **pdl.launch(True),
    )  # fmt: skip
