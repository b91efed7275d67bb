"""What vlmrm-robots takes of vlmrm is what its README names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1]


def taken() -> str:
    """The modules of vlmrm with the names that are imported from them, as lines."""
    names: dict[str, set[str]] = defaultdict(set)
    for path in (FOLDER / "vlmrm_robots").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and re.match(r"vlmrm\b", node.module or ""):
                names[str(node.module)].update(alias.name for alias in node.names)
            elif isinstance(node, ast.Import):
                assert not [alias for alias in node.names if re.match(r"vlmrm\b", alias.name)], path
    return "".join(f"{module}: {', '.join(sorted(names[module]))}\n" for module in sorted(names))


def test_the_readme_names_what_is_taken_from_core():
    named = re.search(
        r"<!-- core -->\n```text\n(.*)```\n", (FOLDER / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert named and named[1] == taken()


def test_a_reward_from_frames_takes_few_modules_and_no_transformers():
    """It goes into LeRobot's and RLinf's environments, whose transformers are others."""
    count = "import sys; sys.modules |= dict.fromkeys(('transformers', 'accelerate', 'sklearn'))\n"
    count += "from vlmrm_robots.frames.frame_reward import FrameReward\n"
    count += "print(*(name for name in sys.modules if name.startswith('vlmrm')))"
    done = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True, cwd=FOLDER, check=False)
    assert done.returncode == 0, done.stderr
    assert len(names := done.stdout.split()) <= 20, names
