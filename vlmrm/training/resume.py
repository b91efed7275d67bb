"""From which checkpoint a run goes on."""

from __future__ import annotations

import logging
from pathlib import Path

from vlmrm.errors import CheckpointError, ConfigError
from vlmrm.modeling import find_checkpoints, newest_complete, verify_complete
from vlmrm.modeling.manifest import BEST, FINAL
from vlmrm.training.arguments import RewardTrainingArguments

logger = logging.getLogger("vlmrm")


def checkpoint_to_resume(args: RewardTrainingArguments) -> Path | None:
    """`resume_from_checkpoint`: a folder, `auto` for the newest complete one, or nothing for a fresh start."""
    asked = str(args.resume_from_checkpoint or "false")
    existing = find_checkpoints(args.output_dir)
    if asked.lower() == "false":
        finished = [path for path in (Path(args.output_dir, name) for name in (FINAL, BEST)) if path.exists()]
        if existing or finished:
            raise ConfigError(
                f"{args.output_dir} already holds {[*finished, *existing][-1].name}: continue with "
                "--resume_from_checkpoint auto, or choose another --output_dir."
            )
        return None
    if asked.lower() in ("auto", "true"):
        path = newest_complete(args.output_dir)
        if path is None:
            which = "complete checkpoint" if existing else "checkpoint"
            logger.info("No %s in %s yet: starting from the beginning", which, args.output_dir)
            return None
    else:
        path = Path(asked)
    manifest = verify_complete(path)
    if not ((path / "optimizer.pt").exists() or any(path.glob("global_step*"))):
        # HF would start a fresh optimizer without a word.
        raise CheckpointError(
            f"{path} has no optimizer state (save_only_model?): train from it as model_name_or_path."
        )
    if manifest["world_size"] != args.world_size:
        logger.warning(
            "%s was saved by %d processes and is resumed by %d: the run goes on, but not bit for bit",
            path, manifest["world_size"], args.world_size,
        )  # fmt: skip
    logger.info("Resuming from %s", path)
    return path
