"""What happens between steps: the epoch reaches the collator, SIGTERM stops every rank after a save."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import torch
from transformers import TrainerCallback

from vlmrm.training.ranks import any_rank


class EpochCallback(TrainerCallback):
    """Tells the collator (and its workers, through shared memory) which epoch it is, for its random choices."""

    def __init__(self, epoch: torch.Tensor):
        self.epoch = epoch

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.epoch.fill_(int(state.epoch or 0))


class SightCallback(TrainerCallback):
    """Has the model prove that it sees when its engine is around it and its weights are where they will be."""

    def __init__(self, prove: Callable[[], None]):
        self.prove = prove

    def on_train_begin(self, args, state, control, **kwargs):
        self.prove()


class PreemptionCallback(TrainerCallback):
    """On SIGTERM: save at the end of the step and stop. The ranks agree, so all of them save the same step."""

    def __init__(self) -> None:
        self.requested = False
        self.stopped_at: int | None = None
        self._previous = None

    def on_train_begin(self, args, state, control, **kwargs):
        if threading.current_thread() is threading.main_thread():
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
