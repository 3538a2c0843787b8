"""Print lines per package, the longest files and the longest functions. Nothing here fails."""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    packages: Counter[str] = Counter()
    files: list[tuple[int, str]] = []
    functions: list[tuple[int, str]] = []
    for path in sorted((ROOT / "inkcap").rglob("*.py")):
        text = path.read_text()
        lines = text.count("\n")
        name = path.relative_to(ROOT / "inkcap").as_posix()
        packages[name.split("/")[0] if "/" in name else "(entry points)"] += lines
        files.append((lines, name))
        functions += [
            (node.end_lineno - node.lineno + 1, f"{name}:{node.lineno} {node.name}")
            for node in ast.walk(ast.parse(text))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno
        ]
    print(f"{sum(packages.values())} lines:", ", ".join(f"{name} {count}" for name, count in packages.most_common()))
    for title, rows in (("longest files", files), ("longest functions", functions)):
        print(f"{title}:")
        for lines, name in sorted(rows, reverse=True)[:8]:
            print(f"  {lines:5} {name}")


if __name__ == "__main__":
    main()
