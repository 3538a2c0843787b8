"""`/v1/completions` over a fake engine."""

import json

import pytest

ASK = {"model": "demo", "prompt": "once upon"}


def post(call, **fields):
    return call("POST", "/v1/completions", json={**ASK, **fields})


def events(response):
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_text_prompt(call, engine, text_answer, tokenizer):
    text_answer(" a time")
    reply = post(call).json()
    (choice,) = reply["choices"]
    assert choice["text"] == " a time" * 8
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    assert engine.requests[0].token_ids == tokenizer.encode_text("once upon")
    assert engine.requests[0].max_tokens == 16
    assert reply["object"] == "text_completion"
    assert reply["usage"]["completion_tokens"] == 16
    assert "completion_tokens_details" not in reply["usage"]


@pytest.mark.parametrize(
    ("prompt", "count"),
    [([5, 6, 7], 1), ([[5, 6, 7], [8]], 2), (["one", "two words"], 2), ("<|message_user|>", 1), ([200_000, 1], 1)],
)
def test_shapes_of_prompts(call, engine, text_answer, tokenizer, prompt, count):
    text_answer("x")
    reply = post(call, prompt=prompt, n=2, max_tokens=3).json()
    assert [choice["index"] for choice in reply["choices"]] == list(range(2 * count))
    ids = [request.token_ids for request in engine.requests]
    assert ids[0] == ids[1]
    if isinstance(prompt, list) and isinstance(prompt[0], int):
        assert ids[0] == prompt
    elif isinstance(prompt, str):
        assert max(ids[0]) < 199_998  # a spelling in text is text
    assert reply["usage"]["prompt_tokens"] == sum(map(len, ids[::2]))
    assert reply["usage"]["completion_tokens"] == 6 * count


def test_echo_with_logprobs_as_evaluation_harnesses_ask(call, engine, text_answer, tokenizer):
    text_answer("!")
    prompt = tokenizer.encode_text("the cat sat")
    reply = post(call, prompt=[prompt], echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234).json()
    (choice,) = reply["choices"]
    assert choice["text"] == "the cat sat!"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["the", " cat", " sat", "!"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"] == [None, {" cat": -0.5}, {" sat": -0.5}, {"!": -0.5}]
    assert logprobs["text_offset"] == [0, 3, 7, 11]


def test_logprobs_without_echo(call, text_answer):
    text_answer("ab cd")
    (choice,) = post(call, logprobs=2, max_tokens=4).json()["choices"]
    assert choice["logprobs"]["text_offset"] == [0, 2, 5, 7]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [2] * 4
    (choice,) = post(call, logprobs=0, max_tokens=2, return_tokens_as_token_ids=True).json()["choices"]
    assert choice["logprobs"]["tokens"][0].startswith("token_id:")
    assert choice["logprobs"]["top_logprobs"][0] == {choice["logprobs"]["tokens"][0]: -0.5}


@pytest.mark.parametrize("options", [{}, {"echo": True}, {"echo": True, "logprobs": 1}, {"logprobs": 1, "n": 2}])
def test_a_stream_concatenates_to_the_whole(call, text_answer, options):
    text_answer("日本 and 🙂 ")
    whole = post(call, max_tokens=12, **options).json()["choices"]
    chunks = events(post(call, max_tokens=12, stream=True, **options))
    for index, choice in enumerate(whole):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == "length"
        if choice["logprobs"] is not None:
            for key, values in choice["logprobs"].items():
                assert [value for c in mine if c["logprobs"] for value in c["logprobs"][key]] == values


def test_prompt_logprobs_and_token_ids(call, text_answer):
    text_answer("x")
    (choice,) = post(call, prompt=[5, 6], prompt_logprobs=1, return_token_ids=True, max_tokens=1).json()["choices"]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1]["6"]["logprob"] == -0.5
    assert choice["prompt_token_ids"] == [5, 6]
    assert len(choice["token_ids"]) == 1


def test_stop_strings(call, engine, text_answer):
    text_answer("one two three ")
    (choice,) = post(call, stop="two", max_tokens=100).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one ", "stop", "two")
    chunks = events(post(call, stop=["e t"], include_stop_str_in_output=True, max_tokens=100, stream=True))
    assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == "one t"
    assert engine.open == {}
    assert len(engine.aborted) == 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [5, -1]}, "prompt"),
        ({"prompt": [5, 200_058]}, "200,057"),
        ({"prompt": [5, 200_054]}, "image placeholder"),
        ({"prompt": [[5], [200_053]]}, "audio placeholder"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [5] * 5000}, "5,000 tokens; this engine accepts 4,096"),
        ({"prompt": [5] * 4090, "max_tokens": 10}, "4,090 tokens and max_tokens is 10, together 4,100"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"use_beam_search": True}, "beam"),
        ({"prompt": [[5]] * 1100}, "1,100 sequences"),
    ],
)
def test_wrong_fields_are_400(call, engine, wrong, said):
    response = post(call, **wrong)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]
    assert engine.requests == []


def test_a_batch_that_does_not_fit_leaves_nothing_behind(call, engine, text_answer):
    text_answer("x")
    engine.capacity = 5
    response = post(call, prompt=[[5]] * 8)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "2"
    assert engine.open == {}
    assert len(engine.aborted) == 5
