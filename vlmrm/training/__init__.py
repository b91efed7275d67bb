"""Training of reward models: the configuration, the trainer, its losses, and resuming."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vlmrm.libraries import needs

if TYPE_CHECKING:
    from vlmrm.config import Configuration
    from vlmrm.training.main import TrainingResult


@needs("train", "training")
def train(config: Configuration = (), /, **keys: Any) -> TrainingResult:
    """Train a reward model, as `vlmrm train` does.

        load_scorer(train("mine.yaml", learning_rate=1e-5).model_dir)

    Args:
        config: a YAML or JSON file, a mapping of keys to values, or the words of a command line.
        keys: keys of the configuration, which override those of `config`. `dataset_path` and `eval_dataset_path` may
            be a `datasets.Dataset`.

    Raises:
        VlmrmError: with one sentence for everything a user can mend; `Preempted` after a save on SIGTERM.
    """
    # Heavy imports, so that `from vlmrm import train` takes no time.
    from vlmrm.data.tables import name_tables
    from vlmrm.training.arguments import RunArguments
    from vlmrm.training.engines import engine_environment
    from vlmrm.training.folder import output_lock, plain_rank_errors
    from vlmrm.training.main import Run

    config = name_tables(config) if isinstance(config, Mapping) else config
    with engine_environment(), plain_rank_errors():
        run = Run(RunArguments.parse(config, "train_rm.py", **name_tables(keys)))
        run.start_log()
        run.check()
        with output_lock(run.args):
            if run.resume():
                run.open()
                run.train()
            return run.close()
