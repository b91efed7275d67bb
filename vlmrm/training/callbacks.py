"""Callbacks between steps (epoch, proof of sight, SIGTERM), and the tally of rows that a run trained on."""

from __future__ import annotations

import logging
import math
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback

from vlmrm.data.comparisons import sample
from vlmrm.engine import ScoredRow
from vlmrm.errors import TrainingError
from vlmrm.measures.analysis import point_figures
from vlmrm.measures.donors import donors_of
from vlmrm.measures.interventions import INTERVENTIONS, Intervention
from vlmrm.measures.pairs import ScoredComparisons, scored_frame
from vlmrm.training.resume import any_rank

# The probe: a small fixed sample of the evaluation set, scored again with grey images and under other prompts.
#
# Its figures show, while a run trains, whether the model looks at the image and the question.


logger = logging.getLogger("vlmrm")

# By intervention, the names of the logged figures, and those of the metrics that they are.
LOGGED = {
    "blank_image": {"probe_image_reliance": "image_reliance", "probe_blank_image_accuracy": "blank_image_accuracy"},
    "swapped_prompt": {"probe_irrelevant_margin": "swapped_prompt_margin", "probe_prompt_reliance": "prompt_reliance"},
}
NEEDED = {"blank_image": "an image to paint grey", "swapped_prompt": "another prompt of its kind to be shown under"}
PROBED: Mapping[str, Intervention] = {name: INTERVENTIONS[name] for name in LOGGED}


class ProbedDataset:
    """The rows of an evaluation set (of `load_comparisons`); those of its probe also have `donors`.

    The collator alters those. The probe is drawn as `max_eval_samples` draws, with donors from the probe,
    so a sweep with `max_eval_samples` = `samples` and an equal `split_seed` has the same figures.
    """

    def __init__(self, dataset: Any, samples: int, seed: int):
        self.dataset = dataset
        self.probe = sample(dataset, None, samples, seed)
        self._positions = {row["index"]: position for position, row in enumerate(self.probe)}
        self._warned: set[str] = set()  # interventions without figures that the log has named

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        columns = self.dataset[numbers]
        rows = [{"index": i, "comparison": c} for i, c in zip(columns["index"], columns["comparison"], strict=True)]
        for row in rows:
            if row["index"] in self._positions:
                donors = donors_of(row["comparison"], self._positions[row["index"]], self.probe)
                row |= {"donors": donors, "sampled": True}
        return rows

    def figures(self, scored: Mapping[int, ScoredRow]) -> dict[str, float]:
        """Return the figures of `LOGGED`, from the scored rows by `index`.

        Figures that no row allows are left out, and named in the log the first time.
        """
        rows = [row for row in self.probe if row["index"] in scored]
        results = [scored[row["index"]] for row in rows]
        comparisons = [row["comparison"] for row in rows]
        values = _reliances(
            ScoredComparisons(comparisons, [row.scores for row in results], [row.altered for row in results])
        )
        figures: dict[str, float] = {}
        for intervention, names in LOGGED.items():
            figures |= {name: values[figure] for name, figure in names.items() if not math.isnan(values[figure])}
            if not names.keys() <= figures.keys() and intervention not in self._warned:
                self._warned.add(intervention)
                logger.info(
                    "No row with a preference among the %d of the probe has %s: %s are not logged",
                    len(self.probe), NEEDED[intervention], " and ".join(names),
                )  # fmt: skip
        return figures


def _reliances(result: ScoredComparisons) -> dict[str, float]:
    """Return `LOGGED` of the scored comparisons; NaN where no row allows them."""
    metrics = [metric for names in LOGGED.values() for metric in names.values()]
    return point_figures(scored_frame(result), metrics) if result.comparisons else dict.fromkeys(metrics, math.nan)


PATIENCE = 1000  # rows from the start without one to train on, before a run is given up
LARGE_SHARE = 0.1


class EpochCallback(TrainerCallback):
    """Sets the epoch of the collator (and of its workers, through shared memory), for its random choices."""

    def __init__(self, epoch: torch.Tensor):
        self.epoch = epoch

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.epoch.fill_(int(state.epoch or 0))


class SightCallback(TrainerCallback):
    """Proves that the model sees once DeepSpeed or FSDP has wrapped it and its weights are on their devices."""

    def __init__(self, prove: Callable[[], None]):
        self.prove = prove

    def on_train_begin(self, args, state, control, **kwargs):
        self.prove()


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
    warned: bool = False
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

    def warn_early(self) -> None:
        """Warn once, early in the run, when a large share of rows is left out."""
        if not self.warned and self.rows >= PATIENCE / 10 and self.dropped >= LARGE_SHARE * self.rows:
            self.warned = True
            self.report()

    def report(self) -> None:
        if self.dropped:
            logger.warning(
                "%d of %d rows (%.0f %%) were left out: why is in *_dropped_rows.jsonl of output_dir",
                self.dropped, self.rows, 100 * self.dropped / self.rows,
            )  # fmt: skip
