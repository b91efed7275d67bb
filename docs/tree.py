"""Write the file tree into docs/architecture.md, each file with the first sentence of its docstring.

python docs/tree.py
"""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
START, END = "<!-- tree: python docs/tree.py -->\n", "<!-- end of the tree -->\n"
COLUMN, WIDTH = 30, 88  # where the comments begin, and how long they may be


def tree(folder: Path, package: str) -> str:
    """Return the files of a package in a folder as indented lines with comments."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", package],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    lines, folders = [], set()
    for path in sorted(
        {Path(name) for name in listed.stdout.splitlines()}, key=lambda path: (*path.parent.parts, "", path.name)
    ):
        if path.suffix != ".py" or not (folder / path).exists():
            continue
        for depth, parent in enumerate(reversed(path.parents)):
            if depth and parent not in folders:
                folders.add(parent)
                lines.append(line(depth - 1, f"{parent.name}/", comment(folder / parent / "__init__.py")))
        if path.name != "__init__.py":
            lines.append(line(len(path.parents) - 1, path.name, comment(folder / path)))
    return "\n".join(lines)


def line(depth: int, name: str, text: str) -> str:
    return f"{'  ' * depth + name:{COLUMN}} {text}".rstrip()


def comment(path: Path) -> str:
    """Return the first sentence of a file's docstring."""
    if not path.exists():
        return ""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    sentence = re.split(r"(?<=\.)\s", " ".join(text.partition("\n\n")[0].split()))[0].rstrip(".:")
    return sentence if len(sentence) <= WIDTH else sentence[: WIDTH - 4].rsplit(" ", 1)[0] + " ..."


def page() -> str:
    """Return the architecture page with the tree as it is now."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    after = rest.partition(END)[2]
    trees = f"{tree(ROOT, 'vlmrm')}\n\n{tree(ROOT / 'packages/robots', 'vlmrm_robots')}"
    return f"{before}{START}\n```text\n{trees}\n```\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
