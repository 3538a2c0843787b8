"""The command `inkcap`: serve, generate, chat, plan, inspect, quantize, ops, demo-checkpoint, bench serve."""

import argparse
import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from inkcap import __version__
from inkcap.base.compatible import add_compatible_flags, dashed, read_compatible_flags
from inkcap.base.config import EngineConfig
from inkcap.base.errors import ConfigInvalid, InkcapError
from inkcap.base.flags import add_flags, config_from_flags

ENGINE_SECTIONS = ("model", "parallel", "cache", "sched")


class Command(NamedTuple):
    """One subcommand. What it runs is imported when it runs, so that `serve` never loads torch into its process."""

    summary: str
    flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, list[str]], int]  # parsed flags, flags left over


def engine_flags(parser: argparse.ArgumentParser) -> None:
    """The model's place, and flags of everything but the server."""
    parser.add_argument("model.path", metavar="MODEL", help="a directory or a hub id")
    add_flags(parser, ENGINE_SECTIONS)


def nothing_left(rest: list[str]) -> None:
    """Refuse flags that no command knows."""
    if rest:
        raise ConfigInvalid(f"{rest[0]!r} is not known here; --help lists what is")


def serve_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model.path", metavar="MODEL", help="a directory or a hub id")
    parser.add_argument("--print-curl", action="store_true", help="print a curl line that works, once it does")
    add_flags(parser)
    add_compatible_flags(parser)


def serve(arguments: argparse.Namespace, rest: list[str]) -> int:
    from inkcap.engine.child import ENGINE_PROGRAM, Child

    nothing_left(rest)
    notes = read_compatible_flags(arguments)
    config = config_from_flags(arguments)
    engine = Child(ENGINE_PROGRAM)  # reads its modules while the server reads its own
    try:
        gc.disable()  # to look for garbage among modules takes a fifth of the time
        from inkcap.server.run import run

        gc.enable()
        return run(config, print_curl=arguments.print_curl, notes=notes, engine=engine)
    finally:
        engine.close(seconds=0)


def generate_flags(parser: argparse.ArgumentParser) -> None:
    engine_flags(parser)
    parser.add_argument("prompt", nargs="*", help="text to continue; default: standard input, one prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument(
        "--chat", action="store_true", help="each prompt is a user's message, and the answer is printed"
    )


def generate(arguments: argparse.Namespace, rest: list[str]) -> int:
    from inkcap.base.request import SamplingParams
    from inkcap.llm import LLM

    flags = [word for word in rest if word.startswith("-")]
    nothing_left(flags)
    prompts = [*arguments.prompt, *rest] or [sys.stdin.read()]  # those after flags are left over by argparse
    params = SamplingParams(max_tokens=arguments.max_tokens, temperature=arguments.temperature)
    with LLM(config_from_flags(arguments)) as llm:
        if arguments.chat:
            results = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
        else:
            results = llm.generate(prompts, params)
        for result in results:
            print(result.outputs[0].text)
    return 0


def chat_flags(parser: argparse.ArgumentParser) -> None:
    from inkcap.terminal.chat import add_flags as add

    add(parser)


def chat(arguments: argparse.Namespace, rest: list[str]) -> int:
    from inkcap.terminal.chat import run

    return run(arguments, rest)


def plan(arguments: argparse.Namespace, rest: list[str]) -> int:
    from inkcap.runner.outline import outline

    nothing_left(rest)
    print(outline(config_from_flags(arguments)))
    return 0


def ops_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--deterministic", action="store_true", help="what deterministic mode chooses")
    parser.add_argument("--ops", metavar="OP=NAME", action="append", default=[], help="replace one op's implementation")
    parser.set_defaults(config=None)


def ops(arguments: argparse.Namespace, rest: list[str]) -> int:
    from inkcap.runner.outline import op_table

    nothing_left(rest)
    fields = {"path": "none", "device": arguments.device, "deterministic": arguments.deterministic}
    arguments.__dict__.update({f"model.{name}": value for name, value in fields.items()})
    config: EngineConfig = config_from_flags(arguments)
    print(op_table(config))
    return 0


def demo_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path)
    parser.add_argument("--family", default="inkling", help="which kind of model")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same bytes")
    parser.add_argument("--format", default="bf16", help="of the experts: bf16, nvfp4, mxfp8 or mixed")


def demo_checkpoint(arguments: argparse.Namespace, rest: list[str]) -> int:
    from inkcap.models.quantize import Settings, write_quantised_demo
    from inkcap.models.registry import write_demo

    nothing_left(rest)
    if arguments.format == "bf16":
        write_demo(arguments.directory, family=arguments.family, seed=arguments.seed)
    else:
        settings = Settings(format=arguments.format)
        write_quantised_demo(arguments.directory, settings, family=arguments.family, seed=arguments.seed)
    print(f"wrote {arguments.directory}: random weights in the published layout, for trying inkcap out")
    return 0


def inspect_flags(parser: argparse.ArgumentParser) -> None:
    from inkcap.models.inspect import add_flags as add

    add(parser)


def inspect(arguments: argparse.Namespace, rest: list[str]) -> int:
    from inkcap.models.inspect import run

    nothing_left(rest)
    return run(arguments)


def quantize_flags(parser: argparse.ArgumentParser) -> None:
    from inkcap.models.quantize import add_flags as add

    add(parser)


def quantize(arguments: argparse.Namespace, rest: list[str]) -> int:
    from inkcap.models.quantize import run

    nothing_left(rest)
    return run(arguments)


def bench_flags(parser: argparse.ArgumentParser) -> None:
    from inkcap.bench.serve import add_flags as add

    add(parser.add_subparsers(required=True).add_parser("serve", help="load a running server and measure it"))


def bench(arguments: argparse.Namespace, rest: list[str]) -> int:
    from inkcap.bench.serve import run

    nothing_left(rest)
    return run(arguments)


COMMANDS = {
    "serve": Command("serve a model over HTTP, as an OpenAI-compatible server", serve_flags, serve),
    "generate": Command("continue prompts, without a server", generate_flags, generate),
    "chat": Command("talk to a model in the terminal", chat_flags, chat),
    "plan": Command("print the memory plan and every automatic choice", engine_flags, plan),
    "inspect": Command("print what a checkpoint holds, from its headers", inspect_flags, inspect),
    "quantize": Command("write a checkpoint with NVFP4 or MXFP8 experts", quantize_flags, quantize),
    "ops": Command("print the table of ops and their implementations", ops_flags, ops),
    "demo-checkpoint": Command("write a small checkpoint with random weights", demo_flags, demo_checkpoint),
    "bench": Command("measure a running server", bench_flags, bench),
}


def main(words: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code. Our own errors become one line on stderr and exit code 2."""
    words = list(sys.argv[1:] if words is None else words)
    words = dashed(words) if words[:1] == ["serve"] else words
    parser = argparse.ArgumentParser(prog="inkcap", description="Serves Thinking Machines Lab's Inkling models.")
    parser.add_argument("--version", action="version", version=f"inkcap {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.summary, description=command.summary, allow_abbrev=False)
        if name in words[:1]:
            command.flags(sub)
    arguments, rest = parser.parse_known_args(words)
    try:
        code = COMMANDS[arguments.command].run(arguments, rest)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read our output has seen enough, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit would fail again
        return 128 + signal.SIGPIPE
    except InkcapError as error:
        print(f"inkcap {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
