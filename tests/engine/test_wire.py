"""Messages survive the wire; another version is refused."""

import pytest

from inkcap.base.errors import CheckpointMismatch, ConfigInvalid, EngineFault
from inkcap.base.request import EngineStats, Finish, GenerateRequest, Logprobs, SamplingParams, TokenDelta
from inkcap.engine import wire


@pytest.mark.parametrize(
    "message",
    [
        wire.Submit(
            GenerateRequest(
                request_id="ü",
                token_ids=[0, 200_057],
                params=SamplingParams(logit_bias={7: -1.5}, stop=["a"], n=2, seed=3),
                seed=2**63 - 1,
                max_tokens=9,
                bad_words_ids=[[1, 2]],
            )
        ),
        wire.Abort("x"),
        wire.AskStats(3),
        wire.Shutdown(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_to_an_engine(message):
    assert wire.to_engine(bytes(wire.encode(message))) == message


@pytest.mark.parametrize(
    "message",
    [
        wire.Deltas(
            [
                TokenDelta("a", [1, 2], [Logprobs([1, 5], [-0.5, -1.0], 1), Logprobs([2], [-9.0], 40)]),
                TokenDelta("b", [3], finish=Finish.STOP, stop_token=3, cached_tokens=64, prompt_logprobs=[None]),
            ]
        ),
        wire.Stats(3, EngineStats(running=1, group_usage={"full": 0.5}, finished={"stop": 2})),
        wire.Drains(),
        wire.Fault("why"),
        wire.SetupFailed("CheckpointMismatch", "why"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_from_an_engine(message):
    assert wire.from_engine(bytes(wire.encode(message))) == message


@pytest.mark.parametrize("frame", [b"", b"\x02\x90"])
def test_another_version_is_refused(frame):
    with pytest.raises(EngineFault, match="version"):
        wire.from_engine(frame)


@pytest.mark.parametrize("error", [CheckpointMismatch("a"), ConfigInvalid("b"), EngineFault("c")])
def test_errors_of_ours_cross_as_they_are(error):
    found = wire.raised(*wire.described(error))
    assert type(found) is type(error)
    assert str(found) == str(error)


def test_other_errors_cross_as_faults():
    found = wire.raised(*wire.described(KeyError("x")))
    assert type(found) is EngineFault
    assert str(found) == "KeyError: 'x'"
    assert type(wire.raised("InkcapError", "x")) is EngineFault
    assert type(wire.raised("annotations", "x")) is EngineFault
