"""Write the spine and the rooms into docs/architecture.md, from the files' docstrings.

python docs/tree.py
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "vlmrm"
PAGE = ROOT / "docs" / "architecture.md"
START, END = "<!-- tree: python docs/tree.py -->\n", "<!-- end of the tree -->\n"

# What a stranger reads, in this order: how a pair becomes a gradient, and a conversation a score.
SPINE = (
    *("conversation.py", "formats/layout.py", "formats/openai.py", "formats/preferences.py"),
    *("data/rows.py", "data/comparisons.py", "rendering.py"),
    *("batching/tree.py", "batching/shared.py", "batching/collator.py"),
    *("modeling/reward_model.py", "modeling/attention.py", "modeling/head.py", "engine.py"),
    *("training/losses.py", "training/step.py", "training/trainer.py", "training/main.py"),
    *("scoring/scorer.py", "measures/pairs.py", "measures/metrics.py"),
)


def spine() -> str:
    """Return the files of the spine as a table: name, lines, first sentence."""
    rows = [f"| `{name}` | {lines(PACKAGE / name)} | {sentence(PACKAGE / name)} |" for name in SPINE]
    total = sum(lines(PACKAGE / name) for name in SPINE)
    return "\n".join(["| file | lines | |", "|---|---|---|", *rows, f"| | {total} | |"])


def rooms() -> str:
    """Return the other rooms, a file at the top among them, as a table: name, files, lines, first sentence."""
    rows = []
    for path in sorted(PACKAGE.iterdir(), key=lambda path: (path.is_file(), path.name)):
        files = [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))
        files = [file for file in files if file.relative_to(PACKAGE).as_posix() not in SPINE]
        if not files or path.name in ("__init__.py", "__main__.py"):
            continue
        name = path.name if path.is_file() else f"{path.name}/"
        first = sentence(path if path.is_file() else path / "__init__.py")
        rows.append(f"| `{name}` | {len(files)} | {sum(map(lines, files))} | {first} |")
    return "\n".join(["| room | files | lines | |", "|---|---|---|---|", *rows])


def lines(path: Path) -> int:
    """Return the lines of a file to the nearest ten: the page need not change with every commit."""
    return round(len(path.read_text(encoding="utf-8").splitlines()), -1)


def sentence(path: Path) -> str:
    """Return the first sentence of a file's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=\.)\s", " ".join(text.partition("\n\n")[0].split()))[0].rstrip(".:").replace("|", "\\|")


def page() -> str:
    """Return the architecture page with the tables as they are now."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    after = rest.partition(END)[2]
    return f"{before}{START}\n{spine()}\n\n### The other rooms\n\n{rooms()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
