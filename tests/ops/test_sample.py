"""Drawing: noise against its formula, draws against float64 NumPy, the CPU path against the reference."""

import numpy as np
import pytest
import torch

from inkcap.ops.sample import cpu
from inkcap.ops.sample.ref import Limits, allow, gumbel, noise_bits, noise_keys, penalize, sample, threshold

M64 = 2**64 - 1
M32 = 2**32 - 1
SETTINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.01},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10_000},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 1.7, "top_k": 40, "top_p": 0.6, "min_p": 0.01},
]


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & M64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & M64
    return x ^ x >> 31


def plain_bits(seed: int, position: int, token: int) -> int:
    key = mix(mix(seed + 0x9E3779B97F4A7C15 & M64) + position & M64)
    x = token * 0x9E3779B1 + (key & M32) & M32
    x = (x ^ x >> 16) * 0x21F0AAAD & M32
    x = (x ^ x >> 15) + (key >> 32) & M32
    x = x * 0x735A2D97 & M32
    return x ^ x >> 15


def columns(settings: list[dict[str, float]]) -> tuple[torch.Tensor, Limits | None]:
    """Temperatures of rows, and their limits unless there are none."""
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    rows = [off | row for row in settings]
    kinds = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
    heat, *limits = (torch.tensor([row[name] for row in rows], dtype=kind) for name, kind in kinds.items())
    limited = any(name in row for row in settings for name in ("top_k", "top_p", "min_p"))
    return heat, Limits(*limits) if limited else None


def keyed(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeds and positions of `count` draws."""
    made = np.random.default_rng(seed)
    return torch.from_numpy(made.integers(0, 2**63, count)), torch.from_numpy(made.integers(0, 10**6, count))


def plain_draw(logits: np.ndarray, row: dict[str, float], seed: int, position: int) -> int:
    """One draw, token by token, in float64."""
    heat = row.get("temperature", 1.0)
    if heat == 0:
        return int(np.argmax(logits))
    scaled = (logits / np.float32(heat)).astype(np.float64)
    kept = set(range(len(scaled)))
    if 0 < row.get("top_k", 0) < len(scaled):
        edge = sorted(scaled, reverse=True)[int(row["top_k"]) - 1]
        kept = {i for i in kept if scaled[i] >= edge}
    if row.get("top_p", 1.0) < 1:
        weights = {i: np.exp(scaled[i] - scaled.max()) for i in kept}
        total, mass = sum(weights.values()), 0.0
        for i in sorted(kept, key=lambda i: -scaled[i]):
            mass += weights[i]
            if mass >= float(np.float32(row["top_p"])) * total:
                edge = scaled[i]
                break
        kept = {i for i in kept if scaled[i] >= edge}
    if row.get("min_p", 0.0) > 0:
        kept = {i for i in kept if np.exp(scaled[i] - scaled.max()) >= row["min_p"] * (1 - 1e-6)}
    uniform = {i: (plain_bits(seed, position, i) + 0.5) / 2**32 for i in kept}
    return max(sorted(kept), key=lambda i: scaled[i] - np.log(-np.log1p(-uniform[i])))


def test_noise_is_the_documented_formula():
    seeds = [0, 1, 2**63 - 1, 123456789012345]
    positions = [0, 1, 1_000_000, 17]
    ids = torch.tensor([0, 1, 2, 199_999, 201_023])
    bits = noise_bits(noise_keys(torch.tensor(seeds), torch.tensor(positions)), ids)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        assert bits[row].tolist() == [plain_bits(seed, position, i) for i in ids.tolist()]


def test_cpu_words_are_the_reference_bits():
    seeds, positions = keyed(3)
    keys = noise_keys(seeds, positions)
    assert (cpu.noise_keys(seeds.numpy(), positions.numpy()) == keys.numpy()).all()
    bits = noise_bits(keys, torch.arange(5000))
    assert (cpu._bits(cpu.counters(5000), keys.numpy().astype(np.uint32)) == bits.numpy()).all()


def pearson(counts: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square in standard deviations from its mean."""
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("moves", ["token", "position", "seed"])
def test_noise_is_uniform_and_neighbours_are_independent(moves):
    count = 1 << 18
    steps = torch.arange(count)
    if moves == "token":
        bits = noise_bits(noise_keys(torch.tensor([5]), torch.tensor([9])), steps)[0]
    else:
        seeds = steps if moves == "seed" else torch.full_like(steps, 5)
        positions = steps if moves == "position" else torch.full_like(steps, 9)
        bits = noise_bits(noise_keys(seeds, positions), torch.tensor([77]))[:, 0]
    uniform = bits.double().numpy() / 2**32
    assert abs(pearson(np.histogram(uniform, 1024, (0, 1))[0], np.full(1024, count / 1024))) < 5
    low = (bits.numpy() & 1023).astype(int)  # the low bits too
    assert abs(pearson(np.bincount(low, minlength=1024), np.full(1024, count / 1024))) < 5
    for lag in (1, 2, 3, 64):
        pairs = np.histogram2d(uniform[:-lag], uniform[lag:], 32, ((0, 1), (0, 1)))[0]
        assert abs(pearson(pairs, np.full((32, 32), (count - lag) / 1024))) < 5, lag
        assert abs(np.corrcoef(uniform[:-lag], uniform[lag:])[0, 1]) < 5 / np.sqrt(count), lag


def test_noise_of_two_requests_is_independent():
    """The same tokens at the same position under neighbouring seeds, and one seed at neighbouring positions."""
    ids = torch.arange(1 << 17)
    bits = noise_bits(noise_keys(torch.tensor([8, 9, 8]), torch.tensor([4, 4, 5])), ids).double().numpy() / 2**32
    for other in (1, 2):
        pairs = np.histogram2d(bits[0], bits[other], 32, ((0, 1), (0, 1)))[0]
        assert abs(pearson(pairs, np.full((32, 32), len(ids) / 1024))) < 5


def test_gumbel_stays_finite_at_both_ends():
    ends = gumbel(torch.tensor([0, M32]))
    assert ends.isfinite().all()
    assert ends[0] > 22
    assert ends[1] < -3


@pytest.mark.parametrize("function", [sample.reference, cpu.sample_cpu])
def test_draws_follow_the_softmax(function):
    count, logits = 20_000, torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, -3.0, 0.3, -torch.inf])
    heat = 0.8
    steps = torch.arange(count)
    drawn = function(
        logits.expand(count, -1), *columns([{"temperature": heat}] * count), torch.full_like(steps, 3), steps
    )
    chances = (logits / heat).softmax(0).double().numpy()
    counts = np.bincount(drawn.numpy(), minlength=8)
    assert counts[7] == 0
    assert abs(pearson(counts[:7], count * chances[:7])) < 4


@pytest.mark.parametrize("function", [sample.reference, cpu.sample_cpu])
def test_restricted_draws_follow_the_renormalised_softmax(function):
    count, logits = 20_000, torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, -3.0, 0.3, 0.2])
    steps = torch.arange(count)
    drawn = function(
        logits.expand(count, -1), *columns([{"top_k": 5, "top_p": 0.9}] * count), torch.full_like(steps, 3), steps
    )
    chances = logits.softmax(0).double().numpy()
    chances[[3, 5, 7]] = 0  # top-k leaves 0, 1, 2, 4, 6; 0, 4, 1, 6 hold 0.93 of them and 0, 4, 1 hold 0.84
    chances[2] = 0
    counts = np.bincount(drawn.numpy(), minlength=8)
    assert set(np.flatnonzero(counts)) == {0, 1, 4, 6}
    assert abs(pearson(counts[chances > 0], count * chances[chances > 0] / chances.sum())) < 4


@pytest.mark.parametrize("function", [sample.reference, cpu.sample_cpu])
@pytest.mark.parametrize("vocabulary", [1, 2, 131])
def test_draws_equal_a_plain_derivation(function, vocabulary):
    settings = [row for row in SETTINGS for _ in range(4)]
    logits = torch.randn(len(settings), vocabulary, generator=torch.Generator().manual_seed(1)) * 3
    seeds, positions = keyed(len(settings), seed=2)
    drawn = function(logits, *columns(settings), seeds, positions).tolist()
    for place, row in enumerate(settings):
        expected = plain_draw(logits[place].numpy(), row, int(seeds[place]), int(positions[place]))
        assert drawn[place] == expected, row


@pytest.mark.parametrize("spread", [0.0, 0.05, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("vocabulary", [3000, 20_011])
def test_cpu_draws_what_the_reference_draws(vocabulary, spread):
    """Flat and peaked rows, some with many ties: edges beyond the first few and every fallback come up."""
    logits = torch.randn(len(SETTINGS), vocabulary, generator=torch.Generator().manual_seed(3)) * spread
    logits[::2] = (logits[::2] * 2).round() / 2
    logits[:, 5::7] = -torch.inf
    seeds, positions = keyed(len(SETTINGS), seed=4)
    arguments = (*columns(SETTINGS), seeds, positions)
    assert torch.equal(cpu.sample_cpu(logits, *arguments), sample.reference(logits, *arguments))
    scaled = logits / torch.where(arguments[0] == 0, 1, arguments[0])[:, None]
    limits = (arguments[1].top_k, arguments[1].top_p, arguments[1].min_p)
    edges = threshold(scaled, *limits)
    for row, (k, p, ratio) in enumerate(zip(*(column.tolist() for column in limits), strict=True)):
        if 0 < k < vocabulary or p < 1 or ratio > 0:
            assert cpu.threshold(scaled[row].numpy(), k, p, ratio) == edges[row], SETTINGS[row]


def masks_of(allowed: np.ndarray) -> torch.Tensor:
    """Masks [S, W] int32 of which tokens are allowed [S, 32 W] bool."""
    return torch.from_numpy(np.packbits(allowed, axis=1, bitorder="little").view(np.int32))


SHARES = [0.0, 0.0001, 0.02, 0.1, 0.5, 0.97, 1.0]  # of the tokens that masks allow, from few words to all


@pytest.mark.parametrize("function", [allow.reference, cpu.allow_cpu])
@pytest.mark.parametrize("share", SHARES)
def test_what_masks_forbid_is_set_bit_by_bit(function, share):
    rng = np.random.default_rng(3)
    width = 20_011
    allowed = rng.random((2, 20_032)) < share
    logits = torch.from_numpy(rng.normal(size=(2, width)).astype(np.float32))
    wanted = torch.where(torch.from_numpy(allowed[:, :width]), logits, -torch.inf)
    function(logits, masks_of(allowed))
    assert (logits == wanted).all()


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("function", [sample.reference, cpu.sample_cpu])
def test_masked_rows_draw_as_rows_of_masked_logits(function, share):
    """Every setting, beside rows that are free; also where nothing, or nothing finite, is allowed."""
    rng = np.random.default_rng(int(1000 * share))
    width, rows = 20_011, len(SETTINGS)
    logits = torch.from_numpy(3 * rng.normal(size=(rows, width)).astype(np.float32))
    logits[:, ::9] = -torch.inf
    logits[5, :] = torch.nan
    allowed = rng.random((rows, 20_032)) < share
    allowed[3] = True
    allowed[4] = False
    allowed[6], allowed[6, 9] = False, True
    masks = masks_of(allowed)
    masked = logits.clone()
    allow.reference(masked, masks)
    arguments = (*columns(SETTINGS), *keyed(rows, seed=8))
    wanted = sample.reference(masked, *arguments)
    assert torch.equal(function(logits, *arguments, masks), wanted)
    assert wanted[4] == wanted[6] == -1


@pytest.mark.parametrize("slack", [-4.0, -1.0, 0.0, 0.5, 1.0])
def test_a_line_too_high_costs_time_but_changes_no_draw(monkeypatch, slack):
    """Many winners are below these lines, some rows with candidates that looked as if they reached it."""
    monkeypatch.setattr(cpu, "SLACK", slack)
    logits = torch.randn(2000, 40, generator=torch.Generator().manual_seed(5))
    arguments = (*columns([{}] * 2000), *keyed(2000))
    assert torch.equal(cpu.sample_cpu(logits, *arguments), sample.reference(logits, *arguments))


def test_candidates_are_few_and_hold_the_winner(monkeypatch):
    scored = []
    scores = cpu._scores
    monkeypatch.setattr(cpu, "_scores", lambda scaled, bits: scored.append(len(scaled)) or scores(scaled, bits))
    for spread in (0.01, 3.0):
        scored.clear()
        logits = torch.randn(100, 5000, generator=torch.Generator().manual_seed(6)) * spread
        cpu.sample_cpu(logits, *columns([{}] * 100), *keyed(100))
        assert 5 < sum(scored) / 100 < 40


@pytest.mark.parametrize("function", [sample.reference, cpu.sample_cpu])
def test_greedy_takes_the_lowest_of_equals(function):
    logits = torch.zeros(2, 300)
    logits[1, [250, 40, 90]] = 1.0
    drawn = function(logits, *columns([{"temperature": 0.0}] * 2), *keyed(2))
    assert drawn.tolist() == [0, 40]


@pytest.mark.parametrize("function", [sample.reference, cpu.sample_cpu])
def test_a_row_draws_the_same_alone_and_in_company(function):
    logits = torch.randn(len(SETTINGS), 1000, generator=torch.Generator().manual_seed(7)) * 2
    arguments = (*columns(SETTINGS), *keyed(len(SETTINGS)))
    together = function(logits, *arguments)
    for row in range(len(SETTINGS)):
        alone = function(
            logits[row : row + 1],
            *columns(SETTINGS[row : row + 1]),
            *(column[row : row + 1] for column in arguments[2:]),
        )
        assert alone == together[row], SETTINGS[row]


@pytest.mark.parametrize("function", [penalize.reference, cpu.penalize_cpu])
def test_penalties_against_plain_arithmetic(function):
    made = np.random.default_rng(9)
    logits = torch.from_numpy(made.normal(size=40).astype(np.float32))
    counts = torch.from_numpy(made.integers(0, 3, 40).astype(np.int32))
    seen = (counts > 0) | torch.from_numpy(made.random(40) < 0.3)
    expected = []
    for logit, count, known in zip(logits.tolist(), counts.tolist(), seen.tolist(), strict=True):
        if known:
            logit = logit / 1.3 if logit > 0 else logit * 1.3
        expected.append(logit - 0.4 * count - (0.7 if count else 0))
    function(logits, counts, seen, 1.3, 0.7, 0.4)
    np.testing.assert_allclose(logits.numpy(), expected, rtol=1e-6, atol=1e-6)
