"""llguidance behind one door: grammars are compiled within limits, and matchers say which tokens may come next.

No torch. Compiling and filling masks let other threads run; building a vocabulary (about 1 s) does not.
"""

import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import llguidance
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from inkcap.base.masks import Compiled, Filler, Matcher, readable
from inkcap.base.room import LETTER, WORDS, steady, witness
from inkcap.base.vocabulary import END_TURN, ORDINARY, SPLIT, VOCAB, read_ranks

KEPT_GRAMMARS = 512  # compiled, of a process
COMPILERS = 2  # threads
# A run of blanks between tokens of JSON that is free in its form. Bounded, or a weak model fills its budget with it.
BLANKS = r"[\x20\x0A\x0D\x09]{1,24}"
PROBE_STEPS = 6
# Sets of tokens that masks are put together from: blanks, words, and text inside JSON strings, by the room they need.
SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"[a-zA-Z]{{1,{most}}}" for most in (2, 4, 8, 16)),
    *(f" [a-zA-Z]{{1,{most - 1}}}" for most in (2, 4, 8, 16)),
    *(f"{LETTER}{{1,{most}}}" for most in (2, 4, 8, 16, 30)),
    f"{LETTER}+",
]


def limits() -> llguidance.LLParserLimits:
    """What one grammar may cost: 10 ms of regular expressions when compiled, and the same in one step."""
    return llguidance.LLParserLimits(
        max_items_in_row=10_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=150_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def lark_string(text: str) -> str:
    """A literal of a Lark grammar. JSON's escapes are Lark's."""
    return json.dumps(text)


def json_rule(schema: object, compact: bool, blanks: str = BLANKS) -> str:
    """A Lark expression for JSON of a schema. `compact`: without blanks, as the models write the arguments of calls.

    `blanks`: a regular expression of what may stand between its tokens.
    """
    form = {"whitespace_flexible": False} if compact else {"whitespace_pattern": blanks}
    if isinstance(schema, Mapping):
        return "%json " + json.dumps({**schema, "x-guidance": form})
    return "%json " + json.dumps({"allOf": [schema], "x-guidance": form})  # true and false


def regex_grammar(pattern: str) -> str:
    """A grammar of the texts that a regular expression matches whole."""
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def written_grammar(text: str) -> str:
    """A grammar as users write it: Lark, or GBNF (rules written with `::=`). Raises ValueError."""
    if "::=" not in text:
        return text
    try:
        return gbnf_to_lark(text)
    except (GbnfToLarkError, IndexError, KeyError) as error:
        raise ValueError(str(error)) from None


def regex_rule(pattern: str) -> str:
    """A Lark expression of the texts that a regular expression matches whole."""
    return f"/{llguidance.regex_to_lark(pattern, '')}/"


def json_grammar(schema: object, compact: bool = False, blanks: str = BLANKS) -> str:
    """A grammar of JSON of a schema."""
    return f"start: json\njson: {json_rule(schema, compact, blanks)}\n"


class Compiler:
    """Compiles grammars over one vocabulary in threads of its own, and keeps what it compiled."""

    def __init__(self, ranks: Mapping[bytes, int]) -> None:
        """`ranks`: bytes to id, of all ordinary tokens. Control tokens are part of no text, so no grammar has them.

        llguidance wants one for the end, whose name is such that no grammar can spell it.
        """
        self.ids = ranks
        self._tokenizer = tokenizer(ranks, SLICES)
        self._filler = Filler(ranks)
        self._rest = tokenizer(self._filler.rooms.rest, [])
        self.fill = self._filler.fill
        self.pieces = self._filler.rooms.pieces  # what each token stands for
        self._limits = limits()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._kept: OrderedDict[str, Future[Compiled]] = OrderedDict()
        self._pool = ThreadPoolExecutor(COMPILERS, "grammar")
        self.names: dict[tuple[bytes, ...], tuple[int, ...]] = {}

    @classmethod
    def load(cls, directory: str | Path) -> "Compiler":
        """The compiler of a checkpoint's vocabulary; one a process. Raises what `read_ranks` raises."""
        return _loaded(str(directory))

    def begin(self, grammar: str) -> Future[Compiled]:
        """Compile, or find what was compiled. An error of the grammar is the matcher's."""
        with self._lock:
            found = self._kept.get(grammar)
            if found is None:
                found = self._kept[grammar] = self._pool.submit(self._compile, grammar)
                if len(self._kept) > KEPT_GRAMMARS:
                    self._kept.popitem(last=False)
            else:
                self._kept.move_to_end(grammar)
            return found

    def matcher(self, grammar: str) -> Matcher:
        """A matcher at the start of a text; waits for the grammar."""
        return Matcher(self.begin(grammar).result(), self._filler.rooms)

    def spelling(self, texts: tuple[bytes, ...]) -> tuple[int, ...]:
        """Tokens with which one of `texts`, none of them empty, may begin."""
        found = self.names.get(texts)
        if found is None:
            pieces = {text[:end] for text in texts for end in range(1, len(text) + 1)}
            found = tuple(sorted(self.ids[piece] for piece in pieces if piece in self.ids))
            if len(self.names) >= KEPT_GRAMMARS:
                self.names.clear()
            self.names[texts] = found
        return found

    def _compile(self, grammar: str) -> Compiled:
        number = next(self._numbers)
        whole = llguidance.LLMatcher(self._tokenizer, grammar, limits=self._limits, log_level=0)
        letter = witness(grammar)
        if letter is None:
            return Compiled(number, whole, None, [], steady=False)
        rest = llguidance.LLMatcher(self._rest, grammar, limits=self._limits, log_level=0)
        told_apart = 2 * self._filler.rooms.longest
        return Compiled(number, whole, rest, [self.ids[letter.encode()]] * told_apart, steady(grammar))


def tokenizer(ranks: Mapping[bytes, int], slices: list[str]) -> llguidance.LLTokenizer:
    """llguidance's tokenizer of these tokens; ids without one are never allowed."""
    return llguidance.LLTokenizer.from_tiktoken(  # pyright: ignore[reportAttributeAccessIssue]
        encoder=dict(ranks),
        special_tokens={"end": END_TURN},
        pattern=SPLIT,
        eos_token=END_TURN,
        n_vocab=VOCAB,
        slices=slices,
    )


@lru_cache(maxsize=2)
def _loaded(directory: str) -> Compiler:
    return Compiler(read_ranks(directory))


class _Bytes:
    """A vocabulary of single bytes: enough to see whether a grammar can be compiled and begun."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes((byte,)) for byte in range(256)), b"end")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@lru_cache(maxsize=1)
def _byte_tokenizer() -> llguidance.LLTokenizer:
    wrapped = llguidance.TokenizerWrapper(_Bytes())
    return llguidance.LLTokenizer(wrapped, n_vocab=257, eos_token=256, slices=[])


def probe(grammar: str) -> str:
    """What is wrong with a grammar, in one line; empty if it compiles within the limits and its first steps do, too.

    May take long, or end the process (deep recursion): to be called in a process that can be lost.
    """
    matcher = llguidance.LLMatcher(_byte_tokenizer(), grammar, limits=limits(), log_level=0)
    for _ in range(PROBE_STEPS):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = matcher.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
        if not allowed:
            break
        matcher.consume_token(allowed[0])
    return readable(matcher.get_error()) if matcher.is_error() else ""


assert ORDINARY % 32, "masks of text end inside a word, which `sampling.guide` cuts"
assert VOCAB <= WORDS * 32, "a row of masks has a bit for each token"
