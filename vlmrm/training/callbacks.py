"""What happens beside the steps: lines of figures, curves, SIGTERM, and the rows that are left out."""

from __future__ import annotations

import logging
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import ProgressCallback, TrainerCallback

from vlmrm.errors import TrainingError
from vlmrm.logs import Pace
from vlmrm.outputs import Outputs
from vlmrm.training.folder import any_rank

logger = logging.getLogger("vlmrm")

CURVES = "curves.png"
# Fewer points are no curve, and drawing takes a moment.
LEAST_LINES, LEAST_EVALUATIONS = 10, 2
# What a terminal shows of a line of figures, so that it stays one line; the log file and the trackers have all of it.
SHOWN = ("loss", "accuracy", "eval_loss", "eval_accuracy", "train_loss", "train_runtime")
PATIENCE = 1000  # rows from the start without one to train on, before a run is given up
# By intervention, the names of the logged figures, and those of the metrics that they are.
LOGGED = {
    "blank_image": {"probe_image_reliance": "image_reliance", "probe_blank_image_accuracy": "blank_image_accuracy"},
    "swapped_prompt": {"probe_irrelevant_margin": "swapped_prompt_margin", "probe_prompt_reliance": "prompt_reliance"},
}


class Bar(ProgressCallback):
    """HF's progress bar without its lines of figures: those of `FiguresCallback` are written above it."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        pass


class FiguresCallback(TrainerCallback):
    """Logs each line of figures with the step, the share done and the time left."""

    def __init__(self, outputs: Outputs) -> None:
        self._shown = {*SHOWN, *(f"eval_{name}" for name in outputs.figures)}
        self._training: Pace | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        self._training = Pace(state.max_steps, since=state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs:
            position = self._training.position(state.global_step) if self._training else f"step {state.global_step}"
            figures = {name: value for name, value in logs.items() if name not in ("total_flos", "step")}
            shown = {name: value for name, value in figures.items() if name in self._shown} or figures
            of_all, of_shown = (", ".join(map(_figure, them.items())) for them in (figures, shown))
            step = f"step {position.removeprefix('step ')}"
            logger.info("%s: %s", step, of_all, extra={"in_terminal": f"{step}: {of_shown}"})


def _figure(item: tuple[str, Any]) -> str:
    name, value = item
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"


class CurvesCallback(TrainerCallback):
    """Draws loss and accuracy over steps into `output_dir/curves.png`, after each evaluation and at the end."""

    def on_evaluate(self, args, state, control, **kwargs):
        lines = sum("loss" in entry for entry in state.log_history)
        evaluations = sum("eval_loss" in entry for entry in state.log_history)
        if state.is_world_process_zero and (lines >= LEAST_LINES or evaluations >= LEAST_EVALUATIONS):
            from vlmrm.measures.plots import drawing, learning_curves, save_png

            with drawing():
                save_png(learning_curves(state.log_history), Path(args.output_dir) / CURVES)

    on_train_end = on_evaluate


class PreemptionCallback(TrainerCallback):
    """On SIGTERM saves at the end of the step and stops. The ranks agree, so all of them save the same step."""

    def __init__(self) -> None:
        self.requested = False
        self.stopped_at: int | None = None
        self._previous = None

    def on_train_begin(self, args, state, control, **kwargs):
        if threading.current_thread() is threading.main_thread():  # Python allows signal handlers nowhere else
            self._previous = signal.signal(signal.SIGTERM, self._request)

    def _request(self, signum, frame):
        self.requested = True

    def on_step_end(self, args, state, control, **kwargs):
        if any_rank(self.requested, args.device):
            control.should_save = True
            control.should_training_stop = True
            self.stopped_at = state.global_step

    def on_train_end(self, args, state, control, **kwargs):
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None


@dataclass
class RowTally:
    """The number of rows over all ranks that a run trained on and left out."""

    rows: int = 0
    dropped: int = 0
    weight: float = 0.0  # of all pairs trained on
    reason: str = ""  # why this rank's last row was dropped
    trained_before: bool = False  # in the run that this one resumes

    def add(self, rows: int, dropped: int, weight: float) -> None:
        """Count one step."""
        self.rows += rows + dropped
        self.dropped += dropped
        self.weight += weight
        if self.dropped >= PATIENCE:
            self.check()

    def nothing_trained(self) -> bool:
        return not self.weight > 0 and not self.trained_before

    def check(self) -> None:
        """Raise a TrainingError when no row was trained on, with the reason."""
        if self.nothing_trained():
            why = f"left out ({self.reason})" if self.reason else "left out or weigh nothing"
            raise TrainingError(
                f"nothing was trained: all {self.rows} rows so far were {why}: vlmrm check-data says what they hold."
            )

    def report(self) -> None:
        if self.dropped:
            logger.warning(
                "%d of %d rows (%.0f %%) were left out: why is in *_dropped_rows.jsonl of output_dir",
                self.dropped, self.rows, 100 * self.dropped / self.rows,
            )  # fmt: skip
