"""The rules of docs/architecture.md, checked on the source. A failure names the file, the line and the rule."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2] / "inkcap"
MAY_IMPORT = {
    "base": "",
    "ops": "base",
    "parallel": "base ops",
    "cache": "base ops",
    "layers": "base ops parallel cache",
    "weights": "base parallel",
    "models": "base ops parallel cache layers weights",
    "sampling": "base ops parallel",
    "spec": "base ops cache layers models sampling",
    "transfer": "base ops parallel cache",
    "runner": "base ops parallel cache layers models weights sampling spec transfer",
    "sched": "base cache",
    "engine": "base cache sched parallel runner transfer",
    "chat": "base",
    "server": "base chat engine",
    "bench": "base",
    "terminal": "base",
}
NO_TORCH = {"base", "sched", "chat", "server", "cache", "engine", "bench", "terminal"}
TORCH_ALLOWED = {"cache/arena.py", "cache/host.py", "engine/rank.py"}
NO_TORCH_FILES = {  # what `inkcap inspect` needs
    "models/config.py", "models/families.py", "models/inspect.py", "models/states.py", "models/inkling/config.py",
    "models/inkling2/config.py", "parallel/share.py", "weights/headers.py", "weights/stored.py",
}  # fmt: skip
GENERATION_FREE = set(MAY_IMPORT) - {"models", "chat", "base"}
NEVER = {
    "transformers": "an oracle of the tests",
    "tml_renderers": "an oracle of the tests",
    "pickle": "unsafe on load",
}
FILES = sorted(ROOT.rglob("*.py"))


def imports(tree, file):
    """Yield (dotted module, line, inside a function) for each import of one file."""
    package = ["inkcap", *file.parts[:-1]]

    def walk(node, local):
        for child in ast.iter_child_nodes(node):
            inside = local or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            if isinstance(child, ast.Import):
                yield from ((alias.name, child.lineno, local) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                stem = [*base, *([child.module] if child.module else [])]
                yield from ((".".join([*stem, alias.name]), child.lineno, local) for alias in child.names)
            yield from walk(child, inside)

    yield from walk(tree, False)


def broken_rules(rel: PurePosixPath, text: str) -> list[str]:
    """Every rule that the file `rel` (relative to the package) breaks."""
    tree = ast.parse(text)
    own = rel.parts[0] if len(rel.parts) > 1 else None  # files beside the packages are entry points
    if own is not None and own not in MAY_IMPORT:
        return [f"{rel}: package {own} is not in the table of docs/architecture.md"]
    broken = []
    for module, line, local in imports(tree, rel):
        parts = module.split(".")
        other = parts[1] if parts[0] == "inkcap" and len(parts) > 1 and parts[1] != own else None
        if own and other and other not in MAY_IMPORT[own].split():
            broken.append(f"{rel}:{line}: {own} may not import {other}")
        torch_free = own in NO_TORCH or str(rel) in NO_TORCH_FILES
        if parts[0] == "torch" and torch_free and str(rel) not in TORCH_ALLOWED:
            broken.append(f"{rel}:{line}: torch is not allowed here")
        if parts[0] == "triton" and rel.name == "ref.py":
            broken.append(f"{rel}:{line}: a reference may not need Triton")
        if local and own is not None:
            broken.append(f"{rel}:{line}: import inside a function")
        if parts[0] in NEVER:
            broken.append(f"{rel}:{line}: {parts[0]} is {NEVER[parts[0]]}, never imported by the package")
    for node in ast.walk(tree):
        reads = isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")
        if reads and str(rel) != "base/config.py":
            broken.append(f"{rel}:{node.lineno}: the environment is read in base/config.py only")
    if own in GENERATION_FREE and "inkling2" in text.lower():
        broken.append(f"{rel}: a generation is named outside models/, chat/ and base/")
    return broken


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_file_keeps_the_rules(file):
    broken = broken_rules(PurePosixPath(file.relative_to(ROOT).as_posix()), file.read_text())
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("rel", "text", "rule"),
    [
        ("base/x.py", "from inkcap.ops import dispatch", "base may not import ops"),
        ("sched/x.py", "import torch", "torch is not allowed"),
        ("weights/headers.py", "from torch import Tensor", "torch is not allowed"),
        ("sched/x.py", "from ..runner import worker", "sched may not import runner"),
        ("ops/norm/ref.py", "import triton.language as tl", "may not need Triton"),
        ("layers/x.py", "def f():\n    import math", "import inside a function"),
        ("engine/x.py", "import os\nos.environ['A']", "environment"),
        ("layers/x.py", "class Inkling2: pass", "generation"),
        ("models/x.py", "import transformers", "oracle"),
        ("misc/x.py", "", "not in the table"),
    ],
)
def test_a_broken_rule_is_found(rel, text, rule):
    assert any(rule in line for line in broken_rules(PurePosixPath(rel), text))


def test_every_kernel_has_a_reference_and_a_test():
    for folder in (p for p in (ROOT / "ops").iterdir() if p.is_dir() and p.name != "__pycache__"):
        assert (folder / "ref.py").exists(), f"ops/{folder.name} has no ref.py"
        test = ROOT.parent / f"tests/ops/test_{folder.name}.py"
        assert test.exists(), f"{test.name} is missing from tests/ops"


def test_the_layers_have_no_cycle():
    done: list[str] = []
    while len(done) < len(MAY_IMPORT):
        ready = [p for p, d in MAY_IMPORT.items() if p not in done and set(d.split()) <= set(done)]
        assert ready, f"cycle among {sorted(set(MAY_IMPORT) - set(done))}"
        done += ready


@pytest.mark.parametrize(
    "modules",
    [
        "server.app server.run sched.scheduler cache.manager engine.client",  # the server process
        "__main__ models.inspect",  # works from headers alone
    ],
)
def test_what_needs_no_torch_never_loads_it(modules):
    code = (
        f"import sys, {', '.join('inkcap.' + module for module in modules.split())}; "
        "heavy = {'torch', 'transformers', 'tml_renderers'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_types_are_checked_everywhere_but_in_kernels():
    ignored = set(tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["tool"]["pyright"]["ignore"])
    kernels = {
        file.relative_to(ROOT.parent).as_posix()
        for file in FILES
        if re.search(r"^(import triton|from triton\.experimental)", file.read_text(), re.M)
    }
    assert ignored == kernels, "tool.pyright.ignore in pyproject.toml lists exactly the files that declare kernels"
