"""The Grafana dashboard asks only for what a scrape of this server has."""

import json
import re
from pathlib import Path

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from inkcap.base.request import EngineStats

DASHBOARD = Path(__file__).parents[2] / "dashboards" / "grafana.json"
NAME = re.compile(r"\b(?:vllm:|http_)[a-z0-9_]+")
LABEL = re.compile(r"(\w+)\s*(?:=~?|!=|!~)\s*\"")


def scraped(call):
    """Names of all samples, with the labels of each, as Prometheus' own parser reads them."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(call("GET", "/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def queries():
    """Every expression, with its panel's title."""
    board = json.loads(DASHBOARD.read_text())
    panels = [inner for panel in board["panels"] for inner in [panel, *panel.get("panels", [])]]
    found = [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", [])]
    variables = [(v["name"], str(v["query"])) for v in board["templating"]["list"] if v["type"] == "query"]
    return found + variables


def test_every_metric_and_label_of_the_dashboard_is_in_a_scrape(call, engine, chat_answer):
    chat_answer("think", "a b c")
    engine.numbers = EngineStats(group_usage={"full": 0.5})
    call("POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hello"}]})
    samples = scraped(call)
    assert len(queries()) > 15
    for title, expression in queries():
        names = NAME.findall(expression)
        assert names, f"{title} asks for nothing: {expression}"
        for name in names:
            assert name in samples, f"{title} asks for {name}, which no scrape has"
        known = set().union(*(samples[name] for name in names))
        grouped = {
            label for found in re.findall(r"\bby\s*\(([^)]*)\)", expression) for label in re.split(r"\W+", found)
        }
        assert {*LABEL.findall(expression), *grouped} - {""} <= known, f"{title}: {expression}"


def test_a_scrape_is_what_prometheus_reads(call, engine, chat_answer):
    chat_answer("", "x")
    engine.info = msgspec.structs.replace(engine.info, dtype='odd "dtype"\n\\')
    call("POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hello"}]})
    families = list(text_string_to_metric_families(call("GET", "/metrics").text))
    facts = next(f for f in families if f.name == "vllm:cache_config_info").samples[0].labels
    assert facts["dtype"] == 'odd "dtype"\n\\'
    for family in families:
        assert family.documentation
        assert family.type in ("counter", "gauge", "histogram")
        if family.type == "histogram":
            counts = [s.value for s in family.samples if s.name.endswith("_bucket")]
            assert counts, family.name
