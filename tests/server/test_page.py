"""The page at `/`: its files over HTTP, and the page itself in a headless Chromium, against a fake engine."""

import json
import re
import shlex
import subprocess

import httpx
import pytest
from playwright.sync_api import expect, sync_playwright

from inkcap.base.request import EngineStats, TokenDelta
from inkcap.chat.tokens import CALL_JSON, END_MESSAGE, END_TURN, MODEL, TEXT
from inkcap.server.page import FILES
from tests.conftest import CHROMIUM
from tests.server.conftest import DEADLINE_S, until

expect.set_options(timeout=DEADLINE_S * 1000)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
WATCH = """
window.shifted = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shifted += entry.value;
}).observe({ type: "layout-shift", buffered: true });
"""
CONTRAST = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = rgb(getComputedStyle(node).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = walk.nextNode(); text; text = walk.nextNode()) {
    const node = text.parentElement;
    if (!text.data.trim() || !node.checkVisibility()) continue;
    const [a, b] = [light(rgb(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) found.push([text.data.trim().slice(0, 40), ratio]);
  }
  return found;
}"""
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def chromium():
    assert CHROMIUM, "no Chromium here; install it (Debian: apt-get install chromium), or leave out -m browser"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium, site):
    """Opens the page and waits for a state of the server. At the end, errors of a page fail the test."""
    contexts, troubles = [], []

    def open_page(before=None, state="ready", **options):
        context = chromium.new_context(viewport={"width": 1200, "height": 780}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(DEADLINE_S * 1000)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda line: troubles.append(line.text) if "Content Security" in line.text else None)
        page.on("request", lambda sent: troubles.append(sent.url) if not ours(sent.url) else None)
        page.add_init_script(WATCH)
        if before:
            before(page)
        page.goto(site.url + "/")
        expect(page.locator("#state")).to_have_text(state)
        return page

    def ours(url):
        return url.startswith((site.url + "/", "data:", "blob:"))

    yield open_page
    for context in contexts:
        context.close()
    assert troubles == []


def ask(page, text):
    page.get_by_label("Your message", exact=True).last.fill(text)
    page.keyboard.press("Enter")


def finished(page, count=1):
    """The last of `count` answers, once all are complete."""
    expect(page.locator("article.answer[aria-busy=false]")).to_have_count(count)
    return page.locator("article.answer").last


def said(engine, tokenizer, index=-1):
    return tokenizer.decode(engine.requests[index].token_ids)


def test_files_ask_nobody_else_and_hold_no_inline_script(site):
    named = set()
    for path in ("/", "/docs"):
        page = httpx.get(site.url + path)
        assert page.status_code == 200
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'" in policy
        assert "unsafe" not in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bon\w+=|\bstyle=", page.text)
        named |= set(re.findall(r'(?:src|href)="page/([^"]+)"', page.text))
    for name, file in FILES.items():
        text = file.content.decode()
        assert not re.search(r"https?://(?!www\.w3\.org)|@import|innerHTML|\beval\b", text), name
        named |= set(re.findall(r'from "\./([^"]+)"', text))
        got = httpx.get(f"{site.url}/page/{name}")
        assert (got.content, got.headers["content-security-policy"]) == (file.content, policy)
        again = httpx.get(f"{site.url}/page/{name}", headers={"If-None-Match": got.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert named | {"index.html", "docs.html"} == set(FILES)
    assert sum(len(file.content) for file in FILES.values()) < 64 << 10
    for name in ("nothing.js", "..%2Fapp.py", "%2e%2e%2fapp.py"):
        assert httpx.get(f"{site.url}/page/{name}").status_code == 404


@pytest.mark.parametrize("settings", [{"api_key": "k", "default_effort": 0.2}])
def test_facts_for_the_page(site, engine, settings):
    info = httpx.get(site.url + "/page/info").json()
    assert (info["models"], info["key"], info["max_length"]) == (["demo", "alias"], True, 4096)
    assert (info["default_effort"], info["media"]) == (0.2, [])
    engine.numbers = EngineStats(running=3, group_usage={"full": 0.5})
    first, second = (httpx.get(site.url + "/page/live").json() for _ in range(2))
    assert (first["state"], first["stats"]["running"], first["stats"]["group_usage"]) == ("ready", 3, {"full": 0.5})
    assert second["time"] > first["time"]
    engine.die("it was killed")
    assert httpx.get(site.url + "/page/live").json() == {"state": "dead", "time": pytest.approx(first["time"], abs=60),
                                                         "stats": None}  # fmt: skip
    assert "/page/live" not in httpx.get(site.url + "/openapi.json").text


@pytest.mark.browser
def test_an_answer_streams_with_its_thinking_folded_away(opened, engine, chat_answer, tokenizer):
    thinking = "let me see " * 20
    text = "one\nline\n\nnext\n```python\nx = `1` < 2\n```\n\n<b>two</b> & three " + "on and on " * 200
    chat_answer(thinking, text)
    engine.pace_s = 0.002
    page = opened()
    field = page.locator("#question")
    expect(field).to_be_focused()
    place, shifted = field.bounding_box(), page.evaluate("window.shifted")
    ask(page, "Hello <i>there</i>\nand more")
    answer = page.locator("article.answer")
    expect(answer.locator("summary")).to_be_visible()
    expect(answer.locator(".thinking div")).not_to_be_visible()
    expect(answer.locator(".prose")).to_contain_text("<b>two</b> & three on and on")
    assert answer.get_attribute("aria-busy") == "true"
    assert engine.open
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    finished(page)
    assert answer.locator("summary").inner_text().startswith("Thought for")
    assert answer.locator(".thinking div").text_content() == thinking
    assert answer.locator(".prose pre code").text_content() == "x = `1` < 2\n"
    assert answer.locator(".prose > *").evaluate_all("all => all.map((e) => e.tagName)") == ["P", "P", "PRE", "P"]
    assert "```" not in answer.inner_text()
    assert page.locator("article.question p").text_content() == "Hello <i>there</i>\nand more"
    assert "tokens" in answer.locator(".figures").inner_text()
    expect(page.locator("#spoken")).to_contain_text("<b>two</b>")
    expect(field).to_be_focused()
    log = page.locator("#log")
    assert log.evaluate("(log) => log.scrollHeight > log.clientHeight")
    until(lambda: log.evaluate("(log) => log.scrollHeight - log.scrollTop - log.clientHeight") < 3)
    assert field.bounding_box() == place
    assert page.evaluate("window.shifted") == shifted
    ask(page, "again")
    finished(page, 2)
    replayed = said(engine, tokenizer)
    assert all(part in replayed for part in ("Hello <i>there</i>", thinking, text, "again"))


@pytest.mark.browser
def test_the_log_stays_where_the_reader_scrolled(opened, engine, chat_answer):
    chat_answer("", "word " * 800)
    engine.pace_s = 0.001
    page = opened()
    log = page.locator("#log")
    ask(page, "go")
    until(lambda: log.evaluate("(log) => log.scrollTop") > 200)
    log.evaluate("(log) => { log.scrollTop = 40; }")
    finished(page)
    assert log.evaluate("(log) => log.scrollTop") == 40


@pytest.mark.browser
@pytest.mark.parametrize("way", ["Escape", "button", "new"])
def test_stop(opened, engine, text_answer, way):
    text_answer(" on and on")
    engine.pace_s = 0.002
    page = opened()
    ask(page, "go")
    answer = page.locator("article.answer")
    expect(answer).to_contain_text("on and on on and on")
    if way == "Escape":
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop" if way == "button" else "New chat").click()
    until(lambda: not engine.open)
    assert len(engine.aborted) == 1
    expect(page.locator("#question")).to_be_focused()
    if way == "new":
        expect(page.locator("article")).to_have_count(0)
        expect(page.locator("#empty")).to_be_visible()
    else:
        finished(page)
        expect(answer.locator(".figures")).to_contain_text("stopped")
        expect(answer.locator(".error")).to_be_hidden()
    page.keyboard.press("ArrowUp")
    expect(page.locator("#question")).to_have_value("go")


@pytest.mark.browser
def test_retry_asks_the_same_again(opened, engine, chat_answer):
    chat_answer("", "first")
    page = opened()
    ask(page, "question 1")
    finished(page)
    ask(page, "question 2")
    finished(page, 2)
    chat_answer("", "second")
    expect(page.get_by_role("button", name="Retry")).to_have_count(1)
    page.get_by_role("button", name="Retry").click()
    expect(finished(page, 2)).to_contain_text("second")
    assert engine.requests[2].token_ids == engine.requests[1].token_ids
    expect(page.locator("article.question")).to_have_count(2)
    expect(page.get_by_role("button", name="Retry")).to_have_count(1)


@pytest.mark.browser
def test_settings_go_with_the_question(opened, engine, chat_answer, tokenizer):
    chat_answer("", "x")
    page = opened()
    expect(page.locator("#effort option").first).to_have_text("default · 0.9")
    page.get_by_label("Thinking effort").select_option("low")
    page.get_by_label("Temperature").fill("0.25")
    page.get_by_label("Most tokens").fill("77")
    page.get_by_text("More", exact=True).click()
    page.get_by_label("Top p").fill("0.5")
    page.get_by_label("Top k").fill("40")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("System message").fill("Be brief.")
    page.get_by_label("Model").select_option("alias")
    ask(page, "hi")
    finished(page)
    request = engine.requests[0]
    assert (request.max_tokens, request.seed) == (77, 7)
    assert (request.params.temperature, request.params.top_p, request.params.top_k) == (0.25, 0.5, 40)
    assert request.params.min_p == 0.0
    assert all(part in said(engine, tokenizer) for part in ("effort level: 0.2", "Be brief."))
    page.get_by_label("Temperature").fill("9")
    ask(page, "no")
    expect(page.locator("#temperature:invalid")).to_be_focused()
    page.get_by_label("Temperature").fill("")
    page.get_by_label("Tools").fill("{")
    ask(page, "no")
    expect(page.locator("article.answer").last).to_contain_text("not a JSON list")
    assert len(engine.requests) == 1


@pytest.mark.browser
def test_tool_calls_are_shown_and_answered(opened, engine, chat_answer, tokenizer):
    call = [MODEL, *tokenizer.encode_text("get_weather"), CALL_JSON]
    call += [*tokenizer.encode_text('{"name":"get_weather","args":{"city":"<b>SF</b>"}}'), END_MESSAGE]
    engine.answer = lambda _: [*call, *call, END_TURN]
    page = opened()
    page.get_by_text("More", exact=True).click()
    page.get_by_label("Tools").fill(json.dumps([WEATHER]))
    ask(page, "Weather?")
    answer = finished(page)
    expect(answer.locator(".call")).to_have_count(2)
    expect(answer.locator(".call h3").first).to_have_text("Calls get_weather")
    assert answer.locator(".call pre").first.text_content() == '{\n  "city": "<b>SF</b>"\n}'
    chat_answer("", "sunny")
    for index, text in enumerate(("18 degrees", "19 degrees")):
        answer.get_by_label("Result of get_weather").nth(index).fill(text)
    page.get_by_role("button", name="Send results").click()
    expect(finished(page, 2)).to_contain_text("sunny")
    expect(page.get_by_role("button", name="Send results")).to_have_count(0)
    assert all(part in said(engine, tokenizer) for part in ("18 degrees", "19 degrees", '"city":"<b>SF</b>"'))


@pytest.mark.browser
def test_a_call_that_was_cut_off_is_shown_but_not_sent_back(opened, engine):
    parts = [{"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x'}}]
    parts += [{"index": 0, "function": {"arguments": '": 1'}}]
    events = [json.dumps({"choices": [{"index": 0, "delta": {"tool_calls": [part]}}]}) for part in parts]
    sent = []

    def reply(route):
        sent.append(route.request.post_data_json["messages"])
        route.fulfill(body="".join(f"data: {event}\n\n" for event in events))

    page = opened(lambda page: page.route("**/v1/chat/completions", reply))
    ask(page, "one")
    answer = finished(page)
    assert answer.locator(".call pre").text_content() == '{"x": 1'
    expect(page.get_by_role("button", name="Send results")).to_have_count(0)
    ask(page, "two")
    finished(page, 2)
    assert [message["role"] for message in sent[1]] == ["user", "assistant", "user"]
    assert sent[1][1] == {"role": "assistant", "content": ""}


@pytest.mark.browser
def test_errors_are_told_and_can_be_retried(opened, engine, site, chat_answer, tokenizer):
    chat_answer("", "fine")
    engine.capacity = 0
    page = opened()
    ask(page, "one")
    error = page.get_by_role("alert")
    expect(error).to_contain_text("wait already")
    expect(error).to_contain_text("Try again in 2 s.")
    engine.capacity = 100
    page.get_by_role("button", name="Retry").click()
    expect(finished(page)).to_contain_text("fine")
    assert error.count() == 0

    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page, "two")
    expect(error).to_have_text("The server cannot be reached.")
    page.unroute("**/v1/chat/completions")
    died = b'data: {"error":{"message":"the <b>engine</b> died","code":500}}\n\ndata: [DONE]\n\n'
    head = b'data: {"choices":[{"index":0,"delta":{"content":"half"}}]}\n\n'
    for body, told in (
        (head, "The connection ended before the answer was complete."),
        (head + died, "<b>engine</b>"),
    ):
        page.route("**/v1/chat/completions", lambda route, _, body=body: route.fulfill(body=body))
        page.get_by_role("button", name="Retry").click()
        expect(error).to_contain_text(told)
        expect(finished(page, 2).locator(".prose")).to_have_text("half")
        page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=502, body="<html>"))
    page.get_by_role("button", name="Retry").click()
    expect(error).to_have_text("The server answered with status 502.")
    page.unroute("**/v1/chat/completions")

    def die():
        for stream in list(engine.open.values()):
            stream.push(TokenDelta(stream.request.request_id, tokenizer.encode_text("part"), cached_tokens=0))
        engine.die("it was killed")

    engine.answer = lambda _: [MODEL, TEXT, *tokenizer.encode_text(" word" * 5000)]
    page.get_by_role("button", name="Retry").click()
    expect(page.locator("article.answer").last).to_contain_text("word word")
    site.do(die)
    expect(error).to_contain_text("it was killed")
    expect(page.locator("#state")).to_have_text("engine stopped")
    assert "word word" in finished(page, 2).inner_text()


@pytest.mark.browser
def test_a_model_that_loads_and_a_question_before_all_is_known(opened, engine, chat_answer):
    chat_answer("", "fine")
    info, engine.info = engine.info, None
    page = opened(state="loading the model")
    expect(page.locator("#model")).to_have_text("demo")
    ask(page, "hi")
    expect(page.get_by_role("alert")).to_contain_text("still loading")
    engine.info = info
    expect(page.locator("#state")).to_have_text("ready")
    expect(page.locator("#model")).to_have_text("demo · 4,096 tokens · cpu")
    page.get_by_role("button", name="Retry").click()
    expect(finished(page)).to_contain_text("fine")
    page = opened(lambda page: page.route("**/page/*", unless_live), state="unreachable")
    ask(page, "hi")
    expect(finished(page)).to_contain_text("fine")


def unless_live(route):
    """No answer about the server or its engine; the page's files come."""
    return route.abort() if route.request.url.endswith(("/info", "/live")) else route.continue_()


@pytest.mark.browser
@pytest.mark.parametrize("settings", [{"api_key": "secret"}])
def test_the_key_is_asked_for_and_kept_in_memory_only(opened, chat_answer, settings):
    chat_answer("", "fine")
    page = opened()
    ask(page, "hi")
    expect(page.get_by_role("alert")).to_contain_text("API key")
    key = page.get_by_label("API key")
    expect(key).to_be_focused()
    page.keyboard.type("secret")
    page.get_by_role("button", name="Retry").click()
    expect(finished(page)).to_contain_text("fine")
    assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
    page.reload()
    expect(key).to_be_visible()
    expect(key).to_have_value("")


@pytest.mark.browser
def test_the_engine_at_work(opened, engine):
    looks = []

    def answer(route):
        number = len(looks)
        looks.append(number)
        if number == 5:
            return route.abort()
        stats = {"running": 3, "waiting": 1234, "group_usage": {"full": 0.25, "window": 0.042}}
        stats |= {"generated_tokens": 500 + 100 * number, "prompt_tokens": 2000 * number}
        stats |= {"prefix_queries": 1000 + 100 * number, "prefix_hits": 0 if number == 0 else 90 * number}
        if number > 1:
            stats |= {"draft_tokens": 40 * number, "accepted_tokens": 30 * number}
        return route.fulfill(json={"state": "ready", "time": number * 0.5, "stats": stats})

    page = opened(lambda page: page.route("**/page/live", answer))
    page.clock.install()
    expect(page.locator("#running")).to_have_text("3")
    expect(page.locator("#acceptance-row")).to_be_hidden()
    for _ in range(3):
        seen = len(looks)
        page.clock.run_for(1000)
        until(lambda seen=seen: page.evaluate("0") == 0 and len(looks) > seen)
    expect(page.locator("#waiting")).to_have_text("1,234")
    expect(page.locator("#generating")).to_have_text("200")
    expect(page.locator("#prompts")).to_have_text("4,000")
    expect(page.locator("#hits")).to_have_text("90 %")
    expect(page.locator("#acceptance")).to_have_text("75 %")
    full = page.get_by_role("meter", name="Cache group full")
    expect(full).to_have_attribute("aria-valuenow", "25")
    expect(page.locator(".bar .figure")).to_have_text(["25 %", "4.2 %"])
    assert len(page.locator("#spark polyline").get_attribute("points").split()) == len(looks)


@pytest.mark.browser
def test_media_is_offered_only_where_the_server_takes_it(opened, site, chat_answer):
    chat_answer("", "x")
    dropped = """() => {
      const data = new DataTransfer();
      data.items.add(new File(["pixels"], "a.png", { type: "image/png" }));
      return data;
    }"""
    page = opened()
    expect(page.get_by_role("button", name="Attach")).to_have_count(0)
    page.dispatch_event("main", "drop", {"dataTransfer": page.evaluate_handle(dropped)})
    ask(page, "hi")
    assert finished(page).inner_text().startswith("x")
    expect(page.locator("article.question img")).to_have_count(0)
    files = [
        {"name": "a.png", "mimeType": "image/png", "buffer": b"pixels"},
        {"name": "b.wav", "mimeType": "audio/wav", "buffer": b"sound"},
        {"name": "c.txt", "mimeType": "text/plain", "buffer": b"text"},
    ]
    info = httpx.get(site.url + "/page/info").json() | {"media": ["image", "audio"]}
    sent = []

    def reply(route):
        sent.append(route.request.post_data_json)
        route.fulfill(body=b'data: {"choices":[{"index":0,"delta":{"content":"seen"}}]}\n\ndata: [DONE]\n\n')

    def before(page):
        page.route("**/page/info", lambda route: route.fulfill(json=info))
        page.route("**/v1/chat/completions", reply)

    page = opened(before)
    expect(page.get_by_role("button", name="Attach")).to_be_visible()
    page.locator("#files").set_input_files(files)
    expect(page.locator("#attached li")).to_have_count(2)
    page.get_by_role("button", name="Remove a.png").click()
    expect(page.locator("#attached li")).to_have_count(1)
    page.dispatch_event("main", "drop", {"dataTransfer": page.evaluate_handle(dropped)})
    expect(page.locator("#attached li")).to_have_count(2)
    ask(page, "What is this?")
    finished(page)
    assert sent[0]["messages"][-1]["content"] == [
        {"type": "input_audio", "input_audio": {"data": "c291bmQ=", "format": "wav"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,cGl4ZWxz"}},
        {"type": "text", "text": "What is this?"},
    ]
    expect(page.locator("article.question img")).to_have_attribute("alt", "a.png")
    expect(page.locator("#attached li")).to_have_count(0)


@pytest.mark.browser
@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 400)])
def test_readable_and_reachable(opened, engine, chat_answer, scheme, width):
    chat_answer("thinking", "text\n```\ncode\n```\n")
    engine.numbers = EngineStats(running=1, group_usage={"full": 0.5})
    page = opened(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    ask(page, "hi")
    finished(page).locator("summary").click()
    page.get_by_text("More", exact=True).click()
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for role in ("banner", "main", "complementary", "log"):
        expect(page.get_by_role(role)).to_have_count(1)
    nameless = """() => [...document.querySelectorAll("input,select,textarea,button,summary")]
      .filter((e) => !(e.labels?.length || e.ariaLabel || e.textContent.trim())).map((e) => e.outerHTML)"""
    assert page.evaluate(nameless) == []
    page.locator("body").evaluate("(body) => { document.activeElement.blur(); scrollTo(0, 0); }")
    order = []
    for _ in range(40):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
    for stop in ("Skip to the question", "new", "log", "Copy", "Retry", "question", "send", "temperature", "tools"):
        assert stop in order, (stop, order)


@pytest.mark.browser
def test_html_is_refused_by_the_browser_itself(opened):
    page = opened()
    refused = page.evaluate(
        "() => { try { document.body.innerHTML += '<p>x</p>'; return ''; } catch (e) { return e.name; } }"
    )
    assert refused == "TypeError"


@pytest.mark.browser
def test_the_page_of_the_api_lists_every_operation_with_a_command_that_works(opened, site, chat_answer):
    chat_answer("", "ok")
    page = opened()
    page.goto(site.url + "/docs")
    expect(page.locator("main:not([aria-busy])")).to_be_visible()
    paths = httpx.get(site.url + "/openapi.json").json()["paths"]
    assert page.locator("details").count() == sum(len(methods) for methods in paths.values())
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions", "/tokenize"):
        part = page.locator("details", has=page.get_by_text(f"POST {path}", exact=True))
        part.locator("summary").click()
        expect(part.get_by_text("model", exact=True).first).to_be_visible()
        words = shlex.split(part.locator("pre").inner_text())
        done = subprocess.run([*words, "-sS"], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
        assert json.loads(done.stdout).get("error") is None, (path, done.stdout)
