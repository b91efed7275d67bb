"""`vlmrm frames train`: a classifier of success from labelled frames, of its best epoch on held-out ones.

With π the share of successes, the loss is that of logit - log(π / (1 - π)) (logit adjustment, Menon et al. 2021), so
that σ(logit) is the probability of a success in the data however it is balanced. An unfinished training has its last
epoch in the folder `OUTPUT_CHECKPOINT.training`; started again, it goes on there.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.special import expit
from torch.utils.data import DataLoader
from tqdm import tqdm

from vlmrm.errors import ConfigError, TrainingError
from vlmrm.files import exclusive_lock, make_folder, write_file
from vlmrm.libraries import parse_device
from vlmrm_robots.frames.checkpoint import LoadedClassifier, load_classifier, save_classifier
from vlmrm_robots.frames.classifier import FrameClassifier, classifier_config, model_input
from vlmrm_robots.frames.dataset import FrameIndex, Inputs, index_frames, outline_of, split
from vlmrm_robots.frames.evaluation import held_out_frames, logits_of
from vlmrm_robots.frames.qualification import HeldOut, in_words, loss_of, qualify
from vlmrm_robots.frames.settings import TrainSettings, check_same
from vlmrm_robots.trajectories.pictures import write_frames

logger = logging.getLogger("vlmrm")

DIGITS = 3  # of a validation loss: smaller differences are no improvement
STATE = "state.pt"
# Settings with which an unfinished training may go on.
FREE = {"output_checkpoint", "epochs", "patience", "num_workers", "use_cpu", "vis_output_dir"}
FREE |= {"visualize_positive", "max_false_fires", "min_precision", "ignore_around"}


def train_classifier(settings: TrainSettings) -> LoadedClassifier:
    """Train a classifier and write its checkpoint, of the best epoch. Equal seeds and data make equal weights."""
    index, summary = index_frames(
        settings.positive_dir, settings.negative_dir, settings.image_key, settings.image_size
    )
    training, validation = split(index, settings.val_fraction, settings.seed)
    if settings.output_checkpoint.is_dir():
        raise ConfigError(f"output_checkpoint {settings.output_checkpoint} is a folder: name a file.")
    make_folder(settings.output_checkpoint.parent)
    logger.info("%s", summary)
    logger.info("training: %s; validation: %s", index.summary(training), index.summary(validation))
    if settings.visualize_positive:
        write_frames(index.files, settings.image_key, settings.vis_output_dir, successes_only=True)
    folder = Path(f"{settings.output_checkpoint}.training")
    refusal = f"another training is writing into {folder}: wait for its end, or choose another output_checkpoint."
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices), exclusive_lock(folder / ".lock", refusal):
        begun_with = json.loads(settings.model_dump_json(exclude=FREE))
        begun_with["data"] = index.fingerprint
        torch.manual_seed(settings.seed)
        model = initial_classifier(settings)
        origin = {
            "data_fingerprint": begun_with["data"],
            "episodes": tuple(outline_of(file, settings.image_key) for file in index.files),
            "environment": index.environment,
            "crop": index.crop,
        }
        model.spec = model.spec.model_copy(update=origin)
        trainer = FrameTrainer(model, settings, index, training, validation, folder)
        trainer.resume(begun_with)
        trainer.fit(begun_with)
        shutil.rmtree(folder, ignore_errors=True)
    return load_classifier(settings.output_checkpoint, device=str(trainer.device))  # in memory is the last epoch's


def summarise(trained: LoadedClassifier) -> str:
    """Return the held-out figures of a training in a few lines."""
    metrics = trained.config.metrics
    frames, successes = (int(metrics[f"validation_{name}"]) for name in ("frames", "successes"))
    best = f"the best epoch is {int(metrics['epoch'])}"
    held_out = f"on {frames} held-out frames, {successes} of them successes:"
    return f"{best}; {held_out}\n{in_words(metrics, trained.config.threshold)}\nthe classifier is {trained.path}"


def initial_classifier(settings: TrainSettings) -> FrameClassifier:
    """Return the classifier before its first step, with the pretrained encoder that settings name."""
    shared = {"image_size", "hidden_dim", "num_spatial_blocks", "pooling"}
    config = classifier_config(
        architecture=settings.backbone,
        image_keys=settings.image_key,
        use_pretrain=settings.pretrained_encoder_path is not None,
        freeze_encoder=settings.frozen,
        normalisation="unit" if settings.backbone == "resnet10" else "imagenet",
        **settings.model_dump(include=shared),
    )
    model = FrameClassifier(config)
    if settings.pretrained_encoder_path is not None:
        model.load_encoder(settings.pretrained_encoder_path)
    return model.to(memory_format=torch.channels_last)


class FrameTrainer:
    """Trains a frame classifier on the frames `training` of an index, and keeps the epoch best on `validation`."""

    def __init__(
        self,
        model: FrameClassifier,
        settings: TrainSettings,
        index: FrameIndex,
        training: np.ndarray,
        validation: np.ndarray,
        folder: Path,
    ):
        self.settings, self.index, self.folder = settings, index, folder
        self.training, self.validation = training, validation
        self.losses: list[float] = []  # of each epoch so far, on the validation frames
        self.device = parse_device("cpu" if settings.use_cpu else None)
        labels = index.labels[training]
        # A classifier that begins at the prior spends no steps on learning it; the offset removes it from the loss.
        share = float(labels.mean())
        prior = float(np.log(share / (1 - share)))
        with torch.no_grad():
            model.head.bias.add_(prior)
        balanced = settings.balance == "weights"
        self.offset = -prior if balanced else 0.0
        # Of a failure and of a success in the loss: both classes weigh as much.
        self.weights = torch.tensor([0.5 / (1 - share), 0.5 / share] if balanced else [1.0, 1.0]).to(self.device)
        self.model = model.to(self.device)
        self.optimizer = torch.optim.Adam(model.trainable(), settings.lr)

    def resume(self, begun_with: Mapping[str, Any]) -> None:
        """Read the last epoch of an unfinished training; ConfigError if that had other settings or data."""
        if not (self.folder / STATE).is_file():
            return
        stored = torch.load(self.folder / STATE, map_location=self.device, weights_only=True)
        refusal = f"{self.folder} holds an unfinished training with {{}}: delete it to begin anew."
        check_same(stored["begun_with"], begun_with, refusal)
        self.model.load_state_dict(stored["model"])
        self.optimizer.load_state_dict(stored["optimizer"])
        self.losses = stored["losses"]
        logger.info("going on after epoch %d in %s", len(self.losses), self.folder)

    def fit(self, begun_with: Mapping[str, Any]) -> None:
        """Train until patience or the epochs end; each best epoch is written at once."""
        settings = self.settings
        while len(self.losses) < settings.epochs:
            if self.losses and len(self.losses) - 1 - int(np.argmin(self.losses)) >= settings.patience:
                break
            trained = self.train_epoch(len(self.losses))
            logits = logits_of(self.model, self.index, self.validation.tolist())
            labels = self.index.labels[self.validation]
            if not np.isfinite(logits).all():
                raise TrainingError(f"weights are not finite: lower lr, which is {settings.lr}.")
            loss = loss_of(logits, labels)
            self.losses.append(round(loss, DIGITS))
            if self.losses[-1] < min(self.losses[:-1], default=np.inf):
                self._save_best(held_out_frames(self.index, self.validation, logits), loss)
            content = {"begun_with": begun_with, "losses": self.losses, "model": self.model.state_dict()}
            buffer = BytesIO()
            torch.save({**content, "optimizer": self.optimizer.state_dict()}, buffer)
            write_file(self.folder / STATE, buffer.getvalue())
            said = "epoch %d of %d: training loss %.4f, loss on held-out frames %.3f"
            logger.info(said, len(self.losses), settings.epochs, trained, self.losses[-1])

    def batches(self, epoch: int) -> DataLoader:
        """Return the batches of an epoch, which are the same in a training that goes on."""
        order, size = (
            np.random.default_rng((self.settings.seed, epoch)).permutation(self.training),
            self.settings.batch_size,
        )
        batches: Any = [order[start : start + size].tolist() for start in range(0, len(order), size)]
        return DataLoader(self.index, batch_size=None, sampler=batches, num_workers=self.settings.num_workers)  # ty: ignore

    def train_epoch(self, epoch: int) -> float:
        """Train for an epoch; return the mean loss of its steps."""
        losses = []
        own = np.random.SeedSequence([self.settings.seed, epoch]).generate_state(1)
        torch.manual_seed(int(own[0]))  # so that a training that goes on is as one that was never interrupted
        self.model.train()
        for batch in tqdm(self.batches(epoch), f"epoch {epoch + 1}", unit="batch", disable=None):
            labels = batch.pop("labels").to(self.device)
            inputs: Inputs = {key: model_input(frames, self.device) for key, frames in batch.items()}
            logits = self.model(inputs) + self.offset
            loss = F.binary_cross_entropy_with_logits(logits, labels, self.weights[labels.long()])
            if not torch.isfinite(loss):
                raise TrainingError(f"the loss is {loss.item()}: lower lr, which is {self.settings.lr}.")
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return float(np.mean(losses))

    def _save_best(self, held_out: HeldOut, loss: float) -> None:
        verdict = qualify(held_out, self.settings)
        update = {
            "threshold": float(expit(verdict.threshold)),
            "metrics": {**verdict.figures, "epoch": len(self.losses), "loss": loss},
            "qualified": verdict.reason is None,
            "unqualified_because": verdict.reason,
        }
        save_classifier(self.settings.output_checkpoint, self.model, self.model.spec.model_copy(update=update))
