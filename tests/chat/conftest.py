"""The real tokenizer, loaded once from the rank file of the installed oracle, and the oracle itself."""

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from tml_renderers import chat, tokenizers, v0

from inkcap.chat.tokens import Tokenizer, read_rank_file


@pytest.fixture(scope="session")
def rank_file() -> Path:
    spec = find_spec("tml_renderers")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "data" / "o200k_base.tiktoken"


@pytest.fixture(scope="session")
def tokenizer(rank_file: Path) -> Tokenizer:
    return Tokenizer(read_rank_file(rank_file))


@pytest.fixture(scope="session")
def oracle() -> SimpleNamespace:
    """`ids(messages, effort)` and `parse(ids)` of the official renderer, and its tokenizer."""
    tokenizer = tokenizers.O200kBaseChatTokenizer()
    renderer = v0.Renderer(tokenizer)

    def ids(messages: list[dict[str, object]], effort: float | None = None) -> list[int]:
        listed = chat.MessageList.from_oss_messages(messages)
        if effort is None:
            spans, _ = renderer.render_for_completion(listed)
        else:
            spans, _ = renderer.render_for_completion_with_effort(listed, effort)
        return [token for span in spans for token in span.span.int_tokens]

    parser = renderer.render_for_completion(chat.MessageList.from_oss_messages([{"role": "user", "content": "x"}]))[1]
    return SimpleNamespace(ids=ids, parse=parser.parse_tokens, tokenizer=tokenizer, chat=chat)
