"""The guides of a rank's rows: which of them are under rules, and the masks of a step."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inkcap.base.masks import Mask, Matcher
from inkcap.base.matching import Compiler
from inkcap.base.room import WORDS
from inkcap.base.step import RowSetup
from inkcap.runner.transfer import Download
from inkcap.sampling.guide import Guide, Masks, end_texts

EVERY = np.uint32(0xFFFFFFFF)  # a word of masks: all of its tokens


class Guides:
    """The guides of all rows of a rank. Masks of a step are filled while its forward pass runs.

    The tokens that a step drew are asked for when the next one needs them: on a GPU they are on their way until then.
    """

    def __init__(self, compiler: Compiler | None, device: torch.device) -> None:
        """`compiler`: None where there is no vocabulary to hold texts to; rows with rules then fail."""
        self._compiler = compiler
        self._device = device
        self._masks = Masks()
        self._guides: dict[int, Guide] = {}
        self._host = torch.empty(0, WORDS, dtype=torch.int32)
        self.failed: dict[int, str] = {}  # rows that cannot go on, and why
        self._drawn: tuple[list[tuple[int, int]], Download] | None = None  # (row, place) of the last step's tokens

    def open(self, setups: Sequence[RowSetup]) -> None:
        """Follow the rows that have rules, from what they have said so far."""
        for setup in setups:
            if setup.rules is None:
                continue
            if self._compiler is None:
                self.failed[setup.row] = "this engine has no tokenizer, so it cannot hold an answer to rules"
                continue
            guide = Guide(setup.rules, self._compiler, self._masks)
            guide.begin()
            for token in setup.tokens[setup.prompt_length :]:
                guide.advance(token)
            if guide.failed:
                self._fail(setup.row, guide)
            self._guides[setup.row] = guide

    def close(self, rows: Sequence[int]) -> None:
        """Forget rows."""
        for row in rows:
            self._guides.pop(row, None)
            self.failed.pop(row, None)
        if self._drawn is not None and rows:
            places, back = self._drawn
            self._drawn = [(row, place) for row, place in places if row not in rows], back

    def follow(self, rows: Sequence[int]) -> bool:
        """Whether any of `rows` is under rules."""
        return not self._guides.keys().isdisjoint(rows)

    def masks(self, rows: Sequence[int]) -> Tensor | None:
        """Masks [S, WORDS] int32 of the next token of each of `rows`; None if every token is allowed.

        On a CPU they stay what they are until the next call.
        """
        if not self._guides:
            return None
        self._catch_up()
        fixed: list[tuple[int, Mask]] = []
        texts: list[tuple[int, Guide, Matcher]] = []
        free: list[int] = []
        for place, row in enumerate(rows):
            guide = self._guides.get(row)
            if guide is None or row in self.failed:
                free.append(place)
            elif guide.matcher is not None:
                texts.append((place, guide, guide.matcher))
            elif (mask := guide.allowed()) is not None:
                fixed.append((place, mask))
            else:
                free.append(place)
        if len(free) == len(rows):
            return None
        out = self._memory(len(rows))
        words: NDArray[np.uint32] = out.numpy().view(np.uint32)
        words[free] = EVERY
        for place, mask in fixed:
            words[place] = mask
        if texts and self._compiler is not None:
            self._compiler.fill([(matcher, place) for place, _, matcher in texts], words)
            end_texts([(place, guide) for place, guide, _ in texts], words)
            for place, guide, _ in texts:
                if guide.failed:
                    self._fail(rows[place], guide)
                    words[place] = EVERY
        return out.to(self._device, non_blocking=True)

    def _memory(self, rows: int) -> Tensor:
        """Masks [rows, WORDS] to be written: pinned for a GPU, which reads them later; else the same each time."""
        if self._device.type == "cuda":
            return torch.empty(rows, WORDS, dtype=torch.int32, pin_memory=True)
        if len(self._host) < rows:
            self._host = torch.empty(rows, WORDS, dtype=torch.int32)
        return self._host[:rows]

    def drawn(self, rows: Sequence[int], tokens: Tensor) -> None:
        """The step drew tokens [S] int64 for `rows`."""
        self._catch_up()
        places = [(row, place) for place, row in enumerate(rows) if row in self._guides]
        if places:
            self._drawn = places, Download([tokens])

    def _catch_up(self) -> None:
        if self._drawn is None:
            return
        places, back = self._drawn
        self._drawn = None
        if not places:
            return
        numbers = back.wait()[0].tolist()
        for row, place in places:
            guide = self._guides[row]
            guide.advance(numbers[place])
            if guide.failed:
                self._fail(row, guide)

    def _fail(self, row: int, guide: Guide) -> None:
        self.failed.setdefault(row, f"the answer cannot be held to its rules any more: {guide.failed}")
