"""The rules of docs/architecture.md, checked on the source. A failure names the file, the line and the rule."""

import ast
from pathlib import Path

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
}
NO_TORCH = ("base", "sched", "chat", "server", "cache", "engine")
TORCH_ALLOWED = {"cache/arena.py", "cache/host.py", "engine/executor.py", "engine/llm.py"}
GENERATION_FREE = set(MAY_IMPORT) - {"models", "chat", "base"}
FILES = sorted(ROOT.rglob("*.py"))


def imports(tree, file):
    """Yield (dotted module, line, inside a function) for each import of one file."""
    package = ["inkcap", *file.relative_to(ROOT).parts[:-1]]

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


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_file_keeps_the_rules(file):
    rel = file.relative_to(ROOT)
    text = file.read_text()
    tree = ast.parse(text)
    own = rel.parts[0] if len(rel.parts) > 1 else None
    broken = []
    for module, line, local in imports(tree, file):
        parts = module.split(".")
        if parts[0] == "inkcap" and own and len(parts) > 1 and parts[1] != own:
            if parts[1] not in MAY_IMPORT[own].split():
                broken.append(f"{rel}:{line}: {own} may not import {parts[1]}")
        if parts[0] == "torch" and own in NO_TORCH and str(rel) not in TORCH_ALLOWED:
            broken.append(f"{rel}:{line}: torch is not allowed here")
        if parts[0] == "triton" and rel.name == "ref.py":
            broken.append(f"{rel}:{line}: a reference may not need Triton")
        if local and own is not None:
            broken.append(f"{rel}:{line}: import inside a function")
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and ast.unparse(node) in ("os.environ", "os.getenv")
            and str(rel) != "base/config.py"
        ):
            broken.append(f"{rel}:{node.lineno}: the environment is read in base/config.py only")
    if own in GENERATION_FREE and "inkling2" in text.lower():
        broken.append(f"{rel}: a generation is named outside models/ and chat/")
    assert not broken, "\n".join(broken)


def test_every_kernel_has_a_reference_and_a_test():
    for folder in (p for p in (ROOT / "ops").iterdir() if p.is_dir() and p.name != "__pycache__"):
        assert (folder / "ref.py").exists(), f"ops/{folder.name} has no ref.py"
        assert (ROOT.parent / f"tests/ops/test_{folder.name}.py").exists(), (
            f"tests/ops/test_{folder.name}.py is missing"
        )


def test_the_layers_have_no_cycle():
    done: list[str] = []
    while len(done) < len(MAY_IMPORT):
        ready = [p for p, d in MAY_IMPORT.items() if p not in done and set(d.split()) <= set(done)]
        assert ready, f"cycle among {sorted(set(MAY_IMPORT) - set(done))}"
        done += ready
