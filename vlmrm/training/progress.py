"""What a run shows while it trains: lines of figures with the time left, curves, and a word when it learns nothing."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import ProgressCallback, TrainerCallback

from vlmrm.logs import Pace
from vlmrm.measures.intervals import wilson

logger = logging.getLogger("vlmrm")

CURVES = "curves.png"
# Fewer points are no curve, and drawing takes a moment.
LEAST_LINES, LEAST_EVALUATIONS = 10, 2
ENOUGH_PAIRS = 200  # for an interval of ± 7 points
CHANCE = 0.5
# What a terminal shows of a line of figures, so that it stays one line; the log file and the trackers have all of it.
SHOWN = ("loss", "accuracy", "eval_loss", "eval_accuracy", "train_loss", "train_runtime")


class Bar(ProgressCallback):
    """HF's progress bar without its lines of figures: those of `FiguresCallback` are written above it."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        pass


class FiguresCallback(TrainerCallback):
    """Logs each line of figures with the step, the share done and the time left, and a line in long evaluations."""

    def __init__(self) -> None:
        self._training: Pace | None = None
        self._evaluation: Pace | None = None
        self._batches = 0
        # A notebook has HF's own bar, which is no terminal's.
        self._lines_in_evaluation = not sys.stderr.isatty()

    def on_train_begin(self, args, state, control, **kwargs):
        self._training = Pace(state.max_steps, since=state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs:
            position = self._training.position(state.global_step) if self._training else f"step {state.global_step}"
            figures = {name: value for name, value in logs.items() if name not in ("total_flos", "step")}
            shown = {name: value for name, value in figures.items() if name in SHOWN} or figures
            of_all, of_shown = (", ".join(map(_figure, them.items())) for them in (figures, shown))
            step = f"step {position.removeprefix('step ')}"
            logger.info("%s: %s", step, of_all, extra={"in_terminal": f"{step}: {of_shown}"})

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        if state.is_world_process_zero and self._lines_in_evaluation and hasattr(eval_dataloader, "__len__"):
            self._evaluation = self._evaluation or Pace(len(eval_dataloader))
            self._batches += 1
            if self._evaluation.is_due():
                logger.info("evaluating, batch %s", self._evaluation.position(self._batches))

    def on_evaluate(self, args, state, control, **kwargs):
        self._evaluation, self._batches = None, 0


def _figure(item: tuple[str, Any]) -> str:
    name, value = item
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"


class CurvesCallback(TrainerCallback):
    """Draws loss and accuracy over steps into `output_dir/curves.png`, after each evaluation and at the end."""

    def on_evaluate(self, args, state, control, **kwargs):
        self._draw(args, state)

    def on_train_end(self, args, state, control, **kwargs):
        self._draw(args, state)

    def _draw(self, args, state) -> None:
        lines = sum("loss" in entry for entry in state.log_history)
        evaluations = sum("eval_loss" in entry for entry in state.log_history)
        if state.is_world_process_zero and (lines >= LEAST_LINES or evaluations >= LEAST_EVALUATIONS):
            from vlmrm.measures.plots import drawing, learning_curves, save_png

            with drawing():
                save_png(learning_curves(state.log_history), Path(args.output_dir) / CURVES)


class ChanceCallback(TrainerCallback):
    """Says once that the model still guesses, and what to look at; never while evaluations show that it learns.

    `add` counts the pairs of each line of figures. After the warm-up, the later half of all pairs decides: whether the
    95 % interval of its accuracy includes one half.
    """

    def __init__(self) -> None:
        self._lines: list[tuple[int, int]] = []
        self._evaluations: list[tuple[float, int]] = []  # accuracy and pairs
        self._said = False

    def add(self, right: int, pairs: int) -> None:
        """Count the pairs since the last line, and those of them that were ranked right."""
        self._lines.append((right, pairs))

    def on_log(self, args, state, control, logs: Mapping[str, float] | None = None, **kwargs):
        if logs and "eval_accuracy" in logs:
            self._evaluations.append((logs["eval_accuracy"], int(logs["eval_pairs"])))
        if self._said or state.global_step < args.get_warmup_steps(state.max_steps) or self._improves():
            return
        later = self._lines[len(self._lines) // 2 :]
        right, pairs = (sum(counts) for counts in zip(*later, strict=True)) if later else (0, 0)
        if pairs < ENOUGH_PAIRS:
            return
        low, high = wilson(right, pairs)
        if low <= CHANCE <= high:
            self._said = True
            logger.warning(
                "Accuracy is at chance after step %d: %.1f %% of the last %d pairs (95 %% interval %.1f to %.1f %%). "
                "Look at learning_rate (%g), at labels that may be swapped and images that may be blank or missing "
                "(vlmrm check-data), and at what is frozen",
                state.global_step, 100 * right / pairs, pairs, 100 * low, 100 * high, args.learning_rate,
            )  # fmt: skip

    def _improves(self) -> bool:
        """Return whether an evaluation is above chance, or the last one better than the first."""
        above = any(wilson(round(accuracy * pairs), pairs).low > CHANCE for accuracy, pairs in self._evaluations)
        return above or (len(self._evaluations) > 1 and self._evaluations[-1][0] > self._evaluations[0][0])
