"""Draws docs/page.png: `python -m tests.server.picture`. The page is real; the engine yields a listed text."""

import contextlib
from importlib.util import find_spec
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

from inkcap.base.config import EngineConfig, ModelConfig
from inkcap.base.request import EngineStats, GenerateRequest
from inkcap.chat.tokens import END_MESSAGE, END_TURN, MODEL, TEXT, THINKING, Tokenizer, read_rank_file
from tests.conftest import CHROMIUM
from tests.server.conftest import FakeEngine, Site, Stream

PLACE = Path(__file__).parents[2] / "docs" / "page.png"
QUESTION = "What is prefix caching, and when does it help?"
THOUGHT = "The user wants a short explanation. Name the idea, then an example, then a caveat."
ANSWER = """Prefix caching keeps what the model computed for the start of a prompt, so that the next request with the \
same start need not compute it again.

It helps most where many requests share a long beginning:

```python
system = read("instructions.md")   # 4,000 tokens, the same each time
for question in questions:
    ask(system, question)          # only the question is new
```

The other good case is a conversation: each turn repeats all that was said before. One changed token early in the \
prompt makes everything after it new, so put what varies at the end."""


class PictureEngine(FakeEngine):
    """Counts the tokens of its streams, as an engine would."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Stream] = []

    async def stats(self) -> EngineStats:
        made = sum(len(request.token_ids) for request in self.requests)
        return EngineStats(
            running=len(self.open),
            group_usage={"full": 0.12, "window": 0.31, "sconv": 0.06},
            prompt_tokens=made,
            generated_tokens=sum(stream.made for stream in self.streams),
            prefix_queries=made,
            prefix_hits=made * 4 // 5,
        )

    def submit(self, request: GenerateRequest) -> Stream:
        stream = super().submit(request)
        assert isinstance(stream, Stream)
        self.streams.append(stream)
        return stream


def main() -> None:
    spec = find_spec("tml_renderers")
    assert spec is not None
    assert spec.origin is not None
    tokenizer = Tokenizer(read_rank_file(Path(spec.origin).parent / "data" / "o200k_base.tiktoken"))
    engine = PictureEngine()
    engine.pace_s = 0.017
    ids = [MODEL, THINKING, *tokenizer.encode_text(THOUGHT), END_MESSAGE]
    ids += [MODEL, TEXT, *tokenizer.encode_text(ANSWER), END_MESSAGE, END_TURN]
    engine.answer = lambda _: ids
    config = EngineConfig(model=ModelConfig(path="demo", served_names=("inkling-small",)))
    with contextlib.closing(Site(engine, config, tokenizer)) as site, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1120, "height": 700}, color_scheme="light")
        page.goto(site.url + "/")
        for text in ("Good morning", QUESTION):
            page.locator("#question").fill(text)
            page.keyboard.press("Enter")
            expect(page.locator("article.answer[aria-busy=true]")).to_have_count(1)
            expect(page.locator("article.answer[aria-busy=true]")).to_have_count(0, timeout=30_000)
            if text != QUESTION:
                page.get_by_role("button", name="New chat").click()
        page.locator("#question").fill("And across conversations?")
        page.mouse.move(400, 540)
        page.screenshot(path=PLACE)
        browser.close()


if __name__ == "__main__":
    main()
