"""Checkpoints of HF's trainer that count once they are complete, whatever is trained."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from transformers import Trainer

from vlmrm.errors import ConfigError, TrainingError, first_line
from vlmrm.libraries import relies_on
from vlmrm.modeling import write_complete
from vlmrm.modeling.manifest import COMPLETE
from vlmrm.training.folder import rotate, set_aside
from vlmrm.training.resume import is_lost_rank

logger = logging.getLogger("vlmrm")

relies_on(Trainer, "_save_checkpoint", overridden=("_save_checkpoint",))


class CompleteCheckpoints(Trainer):
    """Save checkpoints with a manifest, written last; older checkpoints go only after that.

    Attributes:
        save_extras: writes further files into a checkpoint's folder before it is declared complete.
    """

    save_extras: Callable[[Path], None]

    def worth_saving(self) -> bool:
        """Return whether anything was trained yet."""
        return True

    def _check_finite(self) -> None:
        """Refuse to save weights that are not finite; a TrainingError says so."""
        raise NotImplementedError

    def _save_checkpoint(self, model, trial) -> None:
        folder = Path(self.args.output_dir or "") / f"checkpoint-{self.state.global_step}"
        if not self.worth_saving():
            logger.warning("%s is not saved: no row was trained on yet", folder)
            return
        keep, self.args.save_total_limit = self.args.save_total_limit, None  # older ones go once this one is complete
        try:
            with self._saving(folder):
                # Past TRL's: its model card shows a text pipeline that cannot load a vision-language model.
                Trainer._save_checkpoint(self, model, trial)
        finally:
            self.args.save_total_limit = keep
        if self.args.should_save:
            rotate(folder, keep, self.state.best_model_checkpoint)

    @contextmanager
    def _saving(self, folder: Path) -> Generator[None]:
        """Save a complete checkpoint: the files saved inside, then those of `save_extras`, then `COMPLETE.json`."""
        self._check_finite()
        try:
            if self.args.should_save and folder.exists():
                if (folder / COMPLETE).exists():
                    # A folder that is overwritten must not count until it is complete again.
                    (folder / COMPLETE).unlink()
                else:
                    set_aside(folder)  # left by a killed run
            self.accelerator.wait_for_everyone()
            yield
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self.save_extras(folder)
                write_complete(folder, world_size=self.args.world_size, step=self.state.global_step)
            self.accelerator.wait_for_everyone()
        except (ConfigError, OSError, SafetensorError, RuntimeError) as error:  # RuntimeError is torch's
            if is_lost_rank(error):
                raise
            raise _save_error(error, folder) from error


def _save_error(error: Exception, folder: Path) -> TrainingError:
    full = "No space left" in str(error) or shutil.disk_usage(folder.parent).free < 2**20
    reason = "the disk is full" if full else first_line(error).rstrip(".")
    return TrainingError(
        f"{folder} could not be saved: {reason}; earlier checkpoints are untouched, free space and resume."
    )
