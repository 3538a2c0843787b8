"""Device rows: what the ranks remember of each running sequence, opened and closed by the plan."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from inkcap.base.sampling import BIAS_LIMIT, LOWEST_TEMPERATURE, TokenRules, stop_ids
from inkcap.base.step import BlockEntry, RowSetup
from inkcap.ops.rows.ref import enter_blocks
from inkcap.ops.sample.ref import Limits
from inkcap.runner.transfer import Lent, hosted, upload
from inkcap.sampling.rows import BadWords, Draws, RowExtras

# what sampling needs of every row
COLUMNS = {torch.float32: ("temperature", "top_p", "min_p"), torch.int32: ("top_k",), torch.int64: ("seed",)}


class RowTable:
    """Tokens, lengths, sampling columns and block tables of all rows, on the device.

    `lengths[r]` counts the known tokens of row r, `setups[r]` is what opened it. Tokens and block tables grow by
    doubling as rows get longer than `capacity`. The host keeps `host_lengths`: what `lengths` is once all that was
    queued has run. Nothing here waits for the device.
    """

    def __init__(
        self,
        rows: int,
        groups: dict[str, int],
        vocab_size: int,
        rules: TokenRules,
        device: torch.device,
        *,
        capacity: int = 256,
        spare: int = 0,
    ) -> None:
        """`groups` maps each cache group to its block size. Behind the rows come `spare` ones that are never opened:
        one token 0, no blocks."""
        self.rows, self.groups, self.vocab_size, self.rules, self.device = rows, groups, vocab_size, rules, device
        every = rows + spare
        self.tokens = torch.zeros(every, capacity, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(every, dtype=torch.int64, device=device)
        self.lengths[rows:] = 1
        self.host_lengths = [0] * rows
        self.serial = 0  # grows when rows open
        # columns of one dtype lie together, so that a row opens in few copies
        self.kinds = {
            kind: torch.zeros(len(names), every, dtype=kind, device=device) for kind, names in COLUMNS.items()
        }
        self.columns = {name: self.kinds[kind][i] for kind, names in COLUMNS.items() for i, name in enumerate(names)}
        self.tables = {  # [rows, width]
            group: torch.zeros(every, -(-capacity // block), dtype=torch.int32, device=device)
            for group, block in groups.items()
        }
        self.lent = Lent()
        self.setups: list[RowSetup | None] = [None] * rows
        self.extras: dict[int, RowExtras] = {}
        self.limited: set[int] = set()  # rows with top-k, top-p or min-p

    def setup(self, row: int) -> RowSetup:
        """What opened `row`, which must be open."""
        setup = self.setups[row]
        assert setup is not None, f"row {row} is closed"
        return setup

    def close(self, rows: Sequence[int]) -> None:
        """Forget rows; their block tables point at block 0 afterwards."""
        for row in rows:
            self.setup(row)
            self.setups[row] = None
            self.host_lengths[row] = 0
            self.extras.pop(row, None)
            self.limited.discard(row)
        if rows:
            index = upload(rows, torch.int64, self.device)
            self.lengths.index_fill_(0, index, 0)
            for table in self.tables.values():
                table.index_fill_(0, index, 0)

    def open(self, setups: Sequence[RowSetup]) -> None:
        """Take rows, all of which must be closed."""
        if not setups:
            return
        self.serial += 1
        for setup in setups:
            assert self.setups[setup.row] is None, f"row {setup.row} is taken"
            assert setup.tokens, f"row {setup.row} has no tokens"
            self.setups[setup.row] = setup
            self.host_lengths[setup.row] = len(setup.tokens)
        self.grow(max(len(setup.tokens) for setup in setups))
        for setup in setups:
            self.tokens[setup.row, : len(setup.tokens)] = upload(setup.tokens, torch.int32, self.device)
            params = setup.params
            if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
                self.limited.add(setup.row)
            extras = self._extras(setup)
            if not extras.empty:
                self.extras[setup.row] = extras
        index = upload([setup.row for setup in setups], torch.int64, self.device)
        self.lengths[index] = upload([len(setup.tokens) for setup in setups], torch.int64, self.device)
        values = [_columns(setup) for setup in setups]
        for kind, names in COLUMNS.items():
            self.kinds[kind][:, index] = upload([[v[name] for v in values] for name in names], kind, self.device)

    def place(self, blocks: dict[str, list[BlockEntry]]) -> None:
        """Enter block ids into the block tables; a later entry of the same place wins."""
        last = {(group, entry.row, entry.index): entry.block for group, entries in blocks.items() for entry in entries}
        if not last:
            return
        groups, rows, indices = zip(*last, strict=True)
        for group, entries in blocks.items():
            self._widen(group, max((entry.index for entry in entries), default=-1) + 1)
        numbers = {group: number for number, group in enumerate(self.tables)}
        packed = [*map(numbers.__getitem__, groups), *rows, *indices, *last.values()]
        entered = hosted(packed, torch.int32, self.device).view(4, -1)
        enter_blocks(entered, [*self.tables.values()])
        self.lent.keep(entered)

    def grow(self, length: int) -> None:
        """Make room for `length` tokens a row, and for the block table entries that cover them."""
        if length > self.tokens.shape[1]:
            self.tokens = _widened(self.tokens, length)
        for group, block in self.groups.items():
            self._widen(group, -(-length // block))

    def append(self, rows: Sequence[int], tokens: Tensor) -> None:
        """Add one drawn token to each of `rows`. tokens: [n] int64."""
        index = upload(rows, torch.int64, self.device)
        self.grow(max(self.host_lengths[row] for row in rows) + 1)
        self.tokens[index, self.lengths[index]] = tokens.to(torch.int32)
        self.lengths[index] += 1
        self.note(rows, tokens)

    def note(self, rows: Sequence[int], tokens: Tensor) -> None:
        """The part of `append` that the host does, for tokens [n] that are in `tokens` and `lengths` already."""
        for place, row in enumerate(rows):
            self.host_lengths[row] += 1
            extras = self.extras.get(row)
            if extras is None:
                continue
            if extras.stops is not None and self.host_lengths[row] >= extras.stops_from:
                extras.stops = None
                if extras.empty:  # from here on the row is drawn as most are
                    del self.extras[row]
            if extras.counts is not None and extras.seen is not None:
                drawn = tokens[place : place + 1]  # an index tensor: a single number would be fetched
                extras.counts.scatter_add_(0, drawn, torch.ones_like(drawn, dtype=torch.int32))
                extras.seen.index_fill_(0, drawn, True)

    def draws(self, rows: Sequence[int]) -> Draws:
        """What the sampler needs to draw the next token of each of `rows`."""
        index = upload(rows, torch.int64, self.device)
        columns = {name: column[index] for name, column in self.columns.items()}
        extras = {place: self.extras[row] for place, row in enumerate(rows) if row in self.extras}
        return Draws(
            temperature=columns["temperature"],
            limits=limits_of(columns) if not self.limited.isdisjoint(rows) else None,
            seeds=columns["seed"],
            positions=self.lengths[index],
            logprobs=[self.setup(row).params.logprobs for row in rows],
            extras=extras,
            known={place: self.tokens[rows[place], : self.host_lengths[rows[place]]] for place in extras},
        )

    def _widen(self, group: str, width: int) -> None:
        if width > self.tables[group].shape[1]:
            self.tables[group] = _widened(self.tables[group], width)

    def _extras(self, setup: RowSetup) -> RowExtras:
        params, made = setup.params, RowExtras()
        penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        allowed = params.allowed_token_ids
        least = setup.prompt_length + params.min_tokens
        if len(setup.tokens) < least and (stops := sorted(stop_ids(params, self.rules))):
            made.stops, made.stops_from = self._ids(stops), least
        if params.logit_bias:
            made.bias_ids = self._ids(params.logit_bias)
            biases = upload([*params.logit_bias.values()], torch.float32, self.device)
            made.biases = biases.clamp(-BIAS_LIMIT, BIAS_LIMIT)
        if allowed is not None:
            made.forbidden = torch.ones(self.vocab_size, dtype=torch.bool, device=self.device)
            made.forbidden.index_fill_(0, self._ids(allowed), False)
        # a word with an id that does not exist cannot come about
        if words := [word for word in setup.bad_words_ids if word and 0 <= min(word) <= max(word) < self.vocab_size]:
            made.bad_words = self._bad_words(words)
        if penalised:
            made.repetition = params.repetition_penalty
            made.presence, made.frequency = params.presence_penalty, params.frequency_penalty
            known = self._ids(setup.tokens)
            made.seen = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.device)
            made.seen.index_fill_(0, known, True)
            output = known[setup.prompt_length :]
            made.counts = torch.zeros(self.vocab_size, dtype=torch.int32, device=self.device)
            made.counts.scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        return made

    def _bad_words(self, words: list[list[int]]) -> BadWords:
        width = max(len(word) for word in words) - 1
        prefixes = [[-1] * (width - len(word) + 1) + word[:-1] for word in words]
        return BadWords(
            prefixes=upload(prefixes, torch.int32, self.device).reshape(len(words), width),
            lasts=self._ids(word[-1] for word in words),
        )

    def _ids(self, ids: Iterable[int]) -> Tensor:
        return upload([*ids], torch.int64, self.device)


def limits_of(columns: Mapping[str, Tensor]) -> Limits:
    """What the sampling columns of some rows say about limits."""
    return Limits(columns["top_k"], columns["top_p"], columns["min_p"])


def _columns(setup: RowSetup) -> dict[str, float | int]:
    params = setup.params
    return {
        "temperature": max(params.temperature, LOWEST_TEMPERATURE) if params.temperature > 0 else 0.0,
        "top_k": max(params.top_k, 0),
        "top_p": params.top_p,
        "min_p": params.min_p,
        "seed": setup.seed,
    }


def _widened(table: Tensor, width: int) -> Tensor:
    """The same rows with at least `width` columns, twice as many as before; new ones are 0."""
    wide = table.new_zeros(table.shape[0], max(width, 2 * table.shape[1]))
    wide[:, : table.shape[1]] = table
    return wide
