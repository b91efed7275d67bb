"""Plant faults on purpose, and say which test finds each: python drives/mutants.py [PART OF A FILE OR FAULT] [--all]

Each fault of the table is planted in a copy of the repository, and the cheap tests of its room run until one fails;
with `--all` every test of the room. Run it before a release. A new feature brings its three faults.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
THIRD_PARTY = ("torch", "transformers", "trl", "peft", "datasets", "pandas", "hypothesis")  # imported once for all


@dataclass(frozen=True)
class Mutant:
    """A fault: in `file`, `old` becomes `new`, which the tests of `tests` find."""

    file: str
    old: str
    new: str
    tests: str


LOSSES, COLLATOR, TREE = "vlmrm/training/losses.py", "vlmrm/batching/collator.py", "vlmrm/batching/tree.py"
STEP, ENGINE, PAIRS = "vlmrm/training/step.py", "vlmrm/engine.py", "vlmrm/measures/pairs.py"
METRICS, INTERVALS, HEAD = "vlmrm/measures/metrics.py", "vlmrm/measures/intervals.py", "vlmrm/modeling/head.py"
GRAPHS = "vlmrm/modeling/graphs.py"
OUTCOME, TRANSFORMS = "vlmrm/rewards/outcome.py", "vlmrm/scoring/transforms.py"
REWARD_SET, ORIGINALS = "vlmrm/rewards/reward_set.py", "vlmrm/rewards/originals.py"
SCORER, SERVERS = "vlmrm/scoring/scorer.py", "vlmrm/rewards/servers.py"
ADAPTERS, VERDICTS, DONORS = "vlmrm/adapters/", "vlmrm/formats/verdicts.py", "vlmrm/data/comparisons.py"
DUPLICATES, PARTS = "vlmrm/data/duplicates.py", "vlmrm/modeling/parts.py"
QUEUE, QUALIFIED = "vlmrm/serving/memory_backend.py", "packages/robots/vlmrm_robots/frames/qualification.py"

MUTANTS = (
    # A loss that is another one.
    Mutant(LOSSES, "logits = logits.float()", "logits = logits", "tests/training"),
    Mutant(LOSSES, "chosen - rejected\n", "rejected - chosen\n", "tests/training"),
    Mutant(LOSSES, 'difference - pairs["margin"]', 'difference + pairs["margin"]', "tests/training"),
    Mutant(LOSSES, "(irrelevant * weight * bradley_terry_tie", "(irrelevant * bradley_terry_tie", "tests/training"),
    Mutant(LOSSES, "share = (1 - irrelevant) * ", "share = 1.0 * ", "tests/training"),
    Mutant(LOSSES, 'pairs["target"].isnan()', "1.0", "tests/training"),
    Mutant(LOSSES, "(share * fit).sum() / per\n", "(share * fit).sum() / totals.sum()\n", "tests/training"),
    Mutant(LOSSES, "target[:, None] * steps", "target[:, None]", "tests/training"),
    Mutant(LOSSES, "(2 * variance).sqrt()", "variance.sqrt()", "tests/training"),
    Mutant(LOSSES, "(chosen + rejected) ** 2", "(chosen - rejected) ** 2", "tests/training"),
    Mutant(LOSSES, "torch.where(tie, 0.5 * (win + loss), win)", "win", "tests/training"),
    Mutant(LOSSES, "self.irrelevant_weight * of_ties", "of_ties", "tests/training"),
    Mutant(
        LOSSES,
        "torch.where(tie, bradley_terry_tie(difference), -logsigmoid(difference))",
        "-logsigmoid(difference)",
        "tests/training",
    ),
    # A gradient or a figure of another step.
    Mutant(STEP, "loss = loss * self.accelerator.num_processes", "loss = loss * 1", "tests/end_to_end"),
    Mutant(STEP, 'scores[part["order"].to(scores.device)]', "scores", "tests/training tests/batching"),
    Mutant(STEP, "value.detach() / len(pieces)", "value.detach()", "tests/training tests/batching"),
    Mutant(STEP, 'pairs["tie"] | pairs["outvoted"]', 'pairs["tie"]', "tests/training"),
    Mutant(STEP, 'total[of] / total["pairs"]', "total[of]", "tests/training"),
    Mutant(STEP, "torch.set_rng_state(self.on_cpu)", "pass", "tests/training tests/batching"),
    # Scores that are another conversation's.
    Mutant(COLLATOR, "judgement.weight, pair.tie, False", "1.0, pair.tie, False", "tests/batching"),
    Mutant(COLLATOR, "0.0 if pair.tie or judgement.margin is", "0.0 if judgement.margin is", "tests/batching"),
    Mutant(COLLATOR, "start += len(unit.branches)", "start += 0", "tests/batching"),
    Mutant(COLLATOR, '.argsort(),\n            "cut"', ',\n            "cut"', "tests/batching"),
    Mutant(COLLATOR, "len(rendered) <= self.max_seq_length", "True", "tests/batching tests/data"),
    Mutant(
        COLLATOR,
        "rows, patches = rows + len(unit), patches + unit_patches",
        "rows = rows + len(unit)",
        "tests/batching",
    ),
    Mutant(TREE, "len(parts) - 1) * (end - begin)", "len(parts)) * (end - begin)", "tests/batching"),
    Mutant(TREE, "int(different[0]) if len(different)", "int(different[0]) + 1 if len(different)", "tests/batching"),
    Mutant(ENGINE, "for n in part]).argsort()", "for n in part])", "tests/test_engine.py"),
    Mutant(ENGINE, 'logits[part["order"].to(logits.device)]', "logits", "tests/test_engine.py"),
    Mutant(ENGINE, "rows = [row for part", "return [row for part", "tests/test_engine.py"),
    Mutant(
        HEAD, "linear(input.float(), weight, bias)", "linear(input, weight.to(input.dtype), bias)", "tests/modeling"
    ),
    Mutant(HEAD, "*norm, ACTIVATIONS[self.activation]()]", "*norm]", "tests/modeling"),
    Mutant(HEAD, "if (count := len(self.heads)) > 1:", "if (count := len(self.heads)) > 99:", "tests/modeling"),
    Mutant(GRAPHS, "* (held - layout.before)", "* 0", "tests/modeling"),
    Mutant(GRAPHS, "row.cu_queries[-1:] + len(padding)", "row.cu_queries[-1:]", "tests/modeling"),
    Mutant(GRAPHS, "!= self._addresses:", "is None:", "tests/modeling"),
    Mutant(SCORER, "loaded.model.eval()", "loaded.model.train()", "tests/scoring"),
    Mutant(SCORER, "_ = conversation.answer", "pass", "tests/scoring"),
    # A measure that is another one.
    Mutant(PAIRS, "(margins > 0) + 0.5 * (margins == 0)", "(margins > 0) + 1.0 * (margins == 0)", "tests/measures"),
    Mutant(PAIRS, 'np.where(frame["tie"].to_numpy(bool), np.nan, margins)', "margins", "tests/measures"),
    Mutant(PAIRS, "comparison.agreed()", "comparison.pairs()", "tests/measures tests/evaluation"),
    Mutant(METRICS, "p.credits - credits_of", "credits_of", "tests/measures"),
    Mutant(
        METRICS,
        "p.positions[:, 0] == p.positions[:, 1]",
        "p.positions[:, 0] != p.positions[:, 1]",
        "tests/measures tests/evaluation",
    ),
    Mutant(
        METRICS,
        "np.where(p.longer > 0, p.credits, np.nan)",
        "np.where(p.longer < 0, p.credits, np.nan)",
        "tests/measures",
    ),
    Mutant(INTERVALS, "a.value - b.value, a.rows - b.rows", "a.value - b.value, a.rows + b.rows", "tests/measures"),
    Mutant(INTERVALS, "product = weights * self.values", "product = self.values", "tests/measures"),
    # A reward that is another one, or a failure that is a number.
    Mutant(OUTCOME, "return centred / np.maximum(deviation, FLOOR)", "return centred / deviation", "tests/rewards"),
    Mutant(
        OUTCOME,
        "if global_std:\n        deviation = np.full",
        "if not global_std:\n        deviation = np.full",
        "tests/rewards",
    ),
    Mutant(OUTCOME, "result = np.zeros(len(has_any))", "result = np.full(len(has_any), np.nan)", "tests/rewards"),
    Mutant(OUTCOME, "[: rank()]", "[: rank() + 1]", "tests/rewards"),
    Mutant(REWARD_SET, 'missing = float("nan") if', "missing = 0.0 if", "tests/rewards tests/adapters"),
    Mutant(ORIGINALS, "self._text(value) if place is None else place", "self._text(value)", "tests/rewards/judges"),
    Mutant(ORIGINALS, "if read != original.reads:", "if False:", "tests/rewards/judges"),
    Mutant(ORIGINALS, "path.unlink()", "pass", "tests/rewards/judges"),
    Mutant(TRANSFORMS, "(wins.sum(axis=1) - 0.5) / (len(values) - 1)", "wins.mean(axis=1)", "tests/scoring"),
    Mutant(TRANSFORMS, "(counts - 1) / 2", "(counts - 1)", "tests/scoring"),
    Mutant(TRANSFORMS, "if not np.isfinite(values).all():", "if False:", "tests/scoring tests/rewards"),
    Mutant(SERVERS, "return monotonic() < self.opened + COOL_DOWN", "return False", "tests/rewards"),
    Mutant(SERVERS, "self._passed()\n            raise", "raise", "tests/rewards"),
    Mutant(ADAPTERS + "swift_orm.py", "groups, everywhere=True)", "groups)", "tests/adapters"),
    Mutant(ADAPTERS + "rows.py", "if np.isnan(value) and name in self.needed", "if False", "tests/adapters"),
    Mutant(
        OUTCOME, "group_means(filled[name], codes), overall", "filled[name], overall", "tests/adapters tests/rewards"
    ),
    Mutant("vlmrm/rewards/reward_set.py", "if len(failures) > most else []", "", "tests/rewards"),
    Mutant("vlmrm/rewards/remote.py", "time.monotonic() + PAUSE >= end", "True", "tests/rewards"),
    # Rows that are others.
    Mutant(VERDICTS, '"about same", "neither"], TIE', '"about same", "neither"], SECOND', "tests/formats tests/data"),
    Mutant(DONORS, "isinstance(b, str) and a != b", "isinstance(b, str)", "tests/batching tests/data"),
    Mutant(DUPLICATES, ".bit_count() <= RADIUS", ".bit_count() <= 0", "tests/data tests/evaluation"),
    # Weights that should not learn, or do not.
    Mutant(PARTS, "weight.requires_grad_(False)\n        for piece", "pass\n        for piece", "tests/modeling"),
    Mutant(PARTS, "piece.register_forward_pre_hook(_grad_off)", "pass", "tests/modeling"),
    # A service that answers what nobody asked, or whom it should not.
    Mutant(QUEUE, "status.revision in job.revisions and ", "", "tests/serving"),
    Mutant(QUEUE, "job.deadline < time.monotonic()", "job.deadline < 0", "tests/serving"),
    Mutant("vlmrm/serving/worker_process.py", "SECRETS + LAUNCHER", "LAUNCHER", "tests/serving/test_access.py"),
    # A classifier that is said to be another.
    # What is a unit, and who is accused.
    Mutant(
        "vlmrm/measures/differences.py", "np.maximum(squares, 0) + added", "np.maximum(squares, 0)", "tests/evaluation"
    ),
    Mutant(
        "vlmrm/measures/donors.py", "seen = bool(media_of(comparison.prompt))", "seen = bool([])", "tests/measures"
    ),
    Mutant("vlmrm/measures/analysis.py", "(abs(centre) if gain_counts else centre)", "abs(centre)", "tests/measures"),
    Mutant("vlmrm/measures/analysis.py", "Mean(first - second, scale", "Mean(first + second, scale", "tests/measures"),
    Mutant(QUALIFIED, "proved[~half] = ", "proved[half] = ", "packages/robots/tests/frames"),
    Mutant(QUALIFIED, "one.scenery == first", "one.scenery != first", "packages/robots/tests/frames"),
)


def planted(mutant: Mutant, tree: Path) -> None:
    """Plant the fault in the copy of the repository at `tree`."""
    file = tree / mutant.file
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.file} has {text.count(mutant.old)} times {mutant.old!r}: mend the table.")
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


def found_by(mutant: Mutant, tree: Path, everything: bool) -> str:
    """Return the test that fails, or "" where none does."""
    planted(mutant, tree)
    said, write_end = os.pipe()
    if not os.fork():
        os.dup2(write_end, 1), os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.chdir(tree)
        sys.path[:0] = [str(tree), str(tree / "packages/robots")]
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
        import pytest

        pytest.main(["-qx", "-p", "no:cacheprovider", *([] if everything else ["--cheap"]), *mutant.tests.split()])
        sys.stdout.flush()
        os._exit(0)
    os.close(write_end)
    with os.fdopen(said, encoding="utf-8", errors="replace") as lines:
        failed = [line.split(" ", 2)[1].strip() for line in lines if line.startswith(("FAILED ", "ERROR "))]
    os.wait()
    shutil.copy(ROOT / mutant.file, tree / mutant.file)
    return failed[0] if failed else ""


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(words: list[str]) -> int:
    wanted = [word for word in words if not word.startswith("--")]
    chosen = [it for it in MUTANTS if all(word in f"{it.file} {it.old}" for word in wanted)]
    for module in THIRD_PARTY:
        __import__(module)
    alive = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        for name in filter(None, files.decode().split("\0")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_file():
                shutil.copy(ROOT / name, tree / name)
        for mutant in chosen:
            started = time.monotonic()
            test = found_by(mutant, tree, "--all" in words)
            alive += not test
            what = f"{mutant.file}: {' '.join(mutant.old.split())[:60]}"
            say(f"{time.monotonic() - started:4.0f} s  {test or 'ALIVE':70}  {what}")
    say(f"{len(chosen) - alive} of {len(chosen)} faults were found")
    return int(alive > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
