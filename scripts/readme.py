"""Write the parts of README.md that other files know better: supported models and dependencies.

python scripts/readme.py            rewrites README.md
python scripts/readme.py --check    fails when it would change
"""

import re
import sys
from pathlib import Path

from inkcap.models.families import supported

ROOT = Path(__file__).parents[1]


def models() -> str:
    """A table of every architecture that config.json may name."""
    rows = ["| `architectures` in config.json | family | what inkcap runs of it |", "|---|---|---|"]
    rows += [f"| `{architecture}` | {family} | {reads} |" for architecture, _, family, reads in supported()]
    return "\n".join(rows)


def dependencies() -> str:
    """A table of the packages in pyproject.toml, with the reasons that stand beside them."""
    text = (ROOT / "pyproject.toml").read_text()
    rows = ["| package | needed for | why |", "|---|---|---|"]
    group = None
    for line in text.splitlines():
        opened = re.match(r"(\w+) = \[", line)
        if opened:
            group = {"dependencies": "running"}.get(opened[1], f"extra `{opened[1]}`")
        found = re.search(r"\"([A-Za-z0-9_.-]+)[^\"]*\",?\s+# (.+)", line)
        if found and group:
            rows.append(f"| {found[1]} | {group} | {found[2]} |")
    return "\n".join(rows)


PARTS = {"models": models, "dependencies": dependencies}


def written(readme: str) -> str:
    """`readme` with each part between its markers made anew. Raises ValueError when a marker is missing."""
    for name, make in PARTS.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if readme.count(begin) != 1 or readme.count(end) != 1:
            raise ValueError(f"README.md must have {begin} and {end} once each")
        head, rest = readme.split(begin)
        readme = f"{head}{begin}\n{make()}\n{end}{rest.split(end)[1]}"
    return readme


def main() -> int:
    file = ROOT / "README.md"
    now = file.read_text()
    want = written(now)
    if "--check" in sys.argv[1:]:
        if now != want:
            print("README.md is not what scripts/readme.py writes; run it", file=sys.stderr)
        return int(now != want)
    file.write_text(want)
    return 0


if __name__ == "__main__":
    sys.exit(main())
