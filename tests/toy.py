"""A small model without numbers on the host, so that its steps can be captured, and a loop that runs requests on it."""

from collections import deque
from typing import ClassVar

import torch

from inkcap.base.config import CacheConfig, EngineConfig, ModelConfig, SchedConfig
from inkcap.base.request import GenerateRequest, SamplingParams
from inkcap.base.sampling import TokenRules
from inkcap.base.step import StepPlan
from inkcap.cache.state import LayerState, Plane
from inkcap.parallel.comm import Comm
from inkcap.runner.worker import Worker
from inkcap.sched.scheduler import build_scheduler

VOCABULARY = 211
RULES = TokenRules(stop=(7,), banned=(0, 1, 210))
WIDTH = 5


class Toy:
    """A token's hidden state is made of what it and some tokens before it left in paged state."""

    family = "toy"
    vocab_size = VOCABULARY
    max_length = 400
    states: ClassVar = [
        LayerState("full", 0, (Plane("a", (2,), "float32"),), None, 8, True),
        LayerState("window", 1, (Plane("a", (), "float32"),), 6, 4, True),
        LayerState("sconv", 1, (Plane("a", (3,), "float32"),), 4, 4, False),
    ]

    def __init__(self, device: torch.device) -> None:
        made = torch.Generator().manual_seed(0)
        # whole numbers, as the hidden states are: products of them are exact on every device
        self.mix = torch.randint(-8, 9, (WIDTH, VOCABULARY), generator=made).float().to(device)

    def forward(self, batch):
        packing = batch.packing
        own = ((batch.ids * 31 + packing.positions * 7) % 127).float()
        row, parts = packing.row_of.long(), [own]
        begins = packing.first.repeat_interleave(packing.starts.diff().long(), output_size=len(own))  # [T]
        for state in self.states:
            view = batch.at(state.visit).view(state.group)
            plane = view.planes[0]
            flat = plane.flatten(2) if plane.dim() > 2 else plane.unsqueeze(2)

            def read(back, view=view, flat=flat, state=state, begins=begins):
                at = packing.positions - back
                held = view.table[row, at.clamp(min=0) // view.block].long()
                found = flat[held, at.clamp(min=0) % view.block, -1]
                if not state.reads_own_step:
                    shifted = own.roll(back)
                    found = torch.where(at >= begins, shifted, found)
                return torch.where(at < 0, 0.0, found)

            def store(view=view, plane=plane):
                slots = view.slots.clamp(min=0)  # block 0 takes what nobody keeps
                shaped = own.reshape(-1, *[1] * (plane.dim() - 2)).expand(-1, *plane.shape[2:])
                plane.index_put_((slots // view.block, slots % view.block), shaped)

            if state.reads_own_step:
                store()
                parts.append(sum(read(back) * (back + 1) for back in (1, 3)))
            else:
                parts.append(read(1) + 3 * read(3))
                store()
        parts.append(torch.ones_like(own))
        return torch.stack(parts, 1)

    def head(self, hidden):
        return torch.sin((hidden @ self.mix).double() * 0.37).float() * 3

    def slots(self):
        return {}


def make_worker(device: torch.device, *, graphs: bool, rows: int = 6) -> Worker:
    """A worker over a cache full of NaN."""
    config = EngineConfig(
        model=ModelConfig(path="toy", graphs=graphs, mixed_graphs=graphs),
        cache=CacheConfig(memory_bytes=1 << 20, keep_every=64),
        sched=SchedConfig(rows=rows, step_tokens=48, chunk=32),
    )
    made = Worker(config, Toy(device), Comm.alone(), device=device, rules=RULES)
    for storage in made.arena.storage.values():
        storage[1:] = 0xFF
    return made


PARAMS = [
    SamplingParams(temperature=0.0, ignore_eos=True),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_k=20, ignore_eos=True),
    SamplingParams(temperature=1.2, top_p=0.8, min_p=0.01),
]
RICH = [
    SamplingParams(temperature=1.0, logprobs=3),
    SamplingParams(temperature=1.0, presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.2),
    SamplingParams(temperature=0.9, min_tokens=15, bad_words=["x"], logit_bias={5: 3.0, 9: -100.0}),
    SamplingParams(temperature=0.7, allowed_token_ids=list(range(20, 60)), logprobs=0, prompt_logprobs=2),
]


def requests(params: list[SamplingParams], count: int, seed: int) -> list[GenerateRequest]:
    """`count` requests of all lengths, with these params in turn."""
    made = torch.Generator().manual_seed(seed)
    return [
        GenerateRequest(
            request_id=f"{number}",
            token_ids=torch.randint(2, 200, (int(torch.randint(1, 90, (), generator=made)),), generator=made).tolist(),
            params=params[number % len(params)],
            seed=number * 17,
            max_tokens=10 + number * 5 % 40,
            bad_words_ids=[[44], [30, 31]] if params[number % len(params)].bad_words else [],
        )
        for number in range(count)
    ]


def run(worker: Worker, wanted: list[GenerateRequest], depth: int) -> dict[str, tuple]:
    """Tokens, log-probabilities and finish of each request, with `depth` steps begun beyond the one waited for."""
    scheduler = build_scheduler(
        worker.config.cache,
        worker.config.sched,
        worker.groups,
        worker.memory.layout.pools(),
        stop_ids=worker.rules.stop,
        max_length=worker.max_length,
    )
    for request in wanted:
        scheduler.add(request)
    flights, found = deque(), {request.request_id: ([], [], []) for request in wanted}
    while scheduler.unfinished or flights:
        plan = scheduler.plan()
        if plan is not None:
            flights.append(worker.launch(plan))
        if len(flights) > depth or plan is None:
            for delta in scheduler.apply(flights.popleft().finish()):
                tokens, chances, ends = found[delta.request_id]
                tokens += delta.tokens
                chances += delta.logprobs or []
                ends += [delta.finish] if delta.finish else []
    still = [row for row, setup in enumerate(worker.table.setups) if setup is not None]
    worker.run(StepPlan(step=0, closed=still))  # so that the worker can be used again
    return found
