"""lm-eval measures what the model gives offline: log-likelihoods over HTTP, tokenized by the server, and generation."""

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

from inkcap import LLM, SamplingParams
from inkcap.models.registry import write_demo
from tests.server.conftest import Process

FLAGS = ("--dtype", "float32", "--threads", "1", "--max-num-seqs", "8", "--max-model-len", "512")
TASK = [  # contexts, and what may follow them
    ("The capital of France is", " Paris"),
    ("The capital of France is", " a city of light"),
    ("2 + 2 =", " 4"),
    ("Wörter zählen:", " eins, zwei, drei"),
]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "demo"
    write_demo(folder, family="inkling", seed=0)
    return folder


@pytest.fixture(scope="module")
def model(demo):
    server = Process(["-m", "inkcap", "serve", str(demo), *FLAGS, "--enable-tokenizer-info-endpoint"])
    server.ready()
    url = server.url + "/v1/completions"
    yield LocalCompletionsAPI(base_url=url, model="demo", tokenizer_backend="remote", num_concurrent=1, max_length=512)
    server.close()


def instances(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=given, idx=i) for i, given in enumerate(arguments)]


def test_log_likelihoods_are_those_of_offline_use(model, demo):
    found = model.loglikelihood(instances("loglikelihood", TASK), disable_tqdm=True)
    with LLM(str(demo), dtype="float32", threads=1, max_model_len=512) as llm:
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
        for (context, continuation), (total, greedy) in zip(TASK, found, strict=True):
            (answer,) = llm.generate([context + continuation], params)
            start = len(llm.tokenizer.encode_text(context))
            ids = answer.prompt_token_ids[start:]
            steps = answer.prompt_logprobs[start:]
            chosen = [step[token] for step, token in zip(steps, ids, strict=True)]
            assert total == pytest.approx(sum(chance.logprob for chance in chosen), abs=1e-4)
            assert greedy == all(chance.rank == 1 for chance in chosen)
    assert len({total for total, _ in found}) == len(TASK)


def test_generation_stops_where_the_task_says(model, demo):
    settings = {"until": ["\n\n"], "max_gen_toks": 8, "temperature": 0}
    (found,) = model.generate_until(instances("generate_until", [("The capital", settings)]), disable_tqdm=True)
    with LLM(str(demo), dtype="float32", threads=1, max_model_len=512) as llm:
        params = SamplingParams(max_tokens=8, temperature=0, stop=["\n\n", "<|content_model_end_sampling|>"])
        (answer,) = llm.generate(["The capital"], params)
    assert found == answer.outputs[0].text
