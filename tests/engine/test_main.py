"""The command line, run as a user runs it but in this process."""

import re
import signal
import subprocess
import sys

import pytest

from inkcap.__main__ import COMMANDS, main


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    directory = tmp_path_factory.mktemp("command") / "demo"
    assert main(["demo-checkpoint", str(directory)]) == 0
    return str(directory)


def test_plan_prints_choices_and_blocks_and_names_the_longest_sequence(demo, capsys):
    assert main(["plan", demo, "--cache-memory", "64MiB", "--max-num-seqs", "4", "--tensor-parallel-size", "2"]) == 0
    printed = capsys.readouterr().out
    assert "cache = 0.06 GiB (asked for)" in printed
    assert "a rank of 2" in printed
    assert "the longest single sequence has" in printed


def test_plan_refuses_what_a_start_would_refuse(demo, capsys):
    assert main(["plan", demo, "--cache-memory", "1MiB"]) == 2
    assert "raise" in capsys.readouterr().err.lower()


def test_ops_prints_every_op_and_replaces_one(capsys):
    assert main(["ops", "--device", "cpu", "--ops", "sconv=ref"]) == 0
    lines = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()}
    assert lines["sconv"] == "ref"
    assert lines["attention"] == "cpu"
    assert main(["ops", "--ops", "sconv=nope"]) == 2
    assert "what fits is" in capsys.readouterr().err
    assert main(["ops", "--device", "cpu", "--deterministic"]) == 0
    assert re.search(r"^project +alone +ref, ", capsys.readouterr().out, re.M)
    assert main(["ops", "--device", "cpu", "--deterministic", "--ops", "project=ref"]) == 2
    assert "in deterministic mode; what fits is alone" in capsys.readouterr().err


def test_inspect_reads_a_demo(demo, capsys):
    assert main(["inspect", demo]) == 0
    assert "InklingForConditionalGeneration" in capsys.readouterr().out


def test_generate_continues_each_prompt_and_is_greedy_at_temperature_0(demo, capsys):
    words = ["generate", demo, "Hello", "--max-tokens", "3", "--temperature", "0", "--cache-memory", "64MiB"]
    assert main([*words, "--max-num-seqs", "4", "--threads", "1", "Hello"]) == 0  # prompts on both sides of flags
    first, second = capsys.readouterr().out.splitlines()
    assert first == second != ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "/none/such", "x"], "found no checkpoint"),
        (["generate", "DEMO", "x", "--max-tokens", "0.5"], None),
        (["serve", "DEMO", "--prot", "3"], "--prot"),
        (["demo-checkpoint", "DIR", "--family", "gpt"], "there is no demo of family"),
        (["demo-checkpoint", "DIR", "--format", "int3"], "format 'int3' is unknown"),
        (["inspect", "/none/such"], "found no checkpoint"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(words, message, demo, tmp_path, capsys):
    words = [{"DEMO": demo, "DIR": str(tmp_path / "x")}.get(word, word) for word in words]
    try:
        code = main(words)
    except SystemExit as ended:  # argparse's own
        code = ended.code
    printed = capsys.readouterr().err
    assert code == 2
    assert message is None or message in printed
    assert "Traceback" not in printed


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)


def test_a_reader_that_leaves_ends_the_command_without_a_word(demo):
    command = [sys.executable, "-m", "inkcap", "inspect", demo]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 128 + signal.SIGPIPE
