"""`vlmrm frames train`: a classifier of success from labelled frames.

After each epoch the validation frames are scored; if they are scored better than before, a threshold is chosen on them
and the checkpoint is written. With π the share of successes, the loss is that of logit - log(π / (1 - π)) (logit
adjustment, Menon et al. 2021), so that σ(logit) is the probability of a success in the data however it is balanced.

An unfinished training has its last epoch in the folder `OUTPUT_CHECKPOINT.training`; started again, it goes on there.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.special import expit
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from vlmrm.data.comparisons import data_fingerprint
from vlmrm.errors import ConfigError, TrainingError
from vlmrm.files import exclusive_lock, make_folder, write_file
from vlmrm.libraries import parse_device
from vlmrm_robots.frames.checkpoint import LoadedClassifier, load_classifier, save_classifier
from vlmrm_robots.frames.classifier import FEATURES, FrameClassifier, classifier_config, model_input
from vlmrm_robots.frames.dataset import (
    FrameBatches,
    FrameIndex,
    Inputs,
    class_weights,
    index_frames,
    outline_of,
    split,
)
from vlmrm_robots.frames.evaluation import BATCH, encoded
from vlmrm_robots.frames.qualification import HeldOut, choose_threshold, disqualification, figures, in_words, loss_of
from vlmrm_robots.frames.settings import TrainSettings
from vlmrm_robots.trajectories.pictures import write_frames

logger = logging.getLogger("vlmrm")

DIGITS = 3  # of a validation score: smaller differences are no improvement
SHIFT = 1 / 16  # of a side, at most; 4 pixels of 64, as in DrQ (Kostrikov et al. 2021)
COLOUR = 0.2  # brightness and contrast change by at most this factor
STATE = "state.pt"
# Settings with which an unfinished training may go on.
FREE = {"output_checkpoint", "epochs", "patience", "num_workers", "use_cpu", "vis_output_dir"}
FREE |= {"visualize_positive", "target_fpr", "max_false_fires", "min_precision"}


@dataclass(frozen=True)
class TrainedClassifier(LoadedClassifier):
    """The best classifier, as its checkpoint has it; `epochs` are the (AUC, loss) on the validation frames of each."""

    epochs: list[tuple[float, float]]


def train_classifier(settings: TrainSettings) -> TrainedClassifier:
    """Train a classifier and write its checkpoint. Equal settings and data make equal weights on one machine."""
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
        begun_with["data"] = data_fingerprint([str(settings.positive_dir), str(settings.negative_dir)])
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
    # The model in memory is the last epoch's.
    loaded = load_classifier(settings.output_checkpoint, device=str(trainer.device))
    return TrainedClassifier(**vars(loaded), epochs=trainer.epochs)


def summarise(trained: TrainedClassifier) -> str:
    """Return the held-out figures of a training in a few lines."""
    metrics = trained.config.metrics
    frames, successes = (int(metrics[f"validation_{name}"]) for name in ("frames", "successes"))
    best = f"best of {len(trained.epochs)} epochs is {int(metrics['epoch'])}"
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
        self.epochs: list[tuple[float, float]] = []  # the (AUC, loss) on the validation frames of each so far
        self.device = parse_device("cpu" if settings.use_cpu else None)
        labels = index.labels[training]
        # A classifier that begins at the prior spends no steps on learning it; the offset removes it from the loss.
        share = float(labels.mean())
        prior = float(np.log(share / (1 - share)))
        with torch.no_grad():
            model.head.bias.add_(prior)
        self.offset = 0.0 if settings.balance == "none" else -prior
        self.balance = class_weights(labels)
        # Of a failure and of a success in the loss.
        self.weights = torch.tensor(self.balance if settings.balance == "weights" else [1.0, 1.0]).float()
        self.weights = self.weights.to(self.device)
        self.model = model.to(self.device)
        self.optimizer = torch.optim.Adam(model.trainable(), settings.lr)
        # A frozen encoder's features are constants, unless augmentation changes the frames.
        cached = settings.frozen and not settings.augment
        self.read = cached_features(model, index, folder / "features.npy") if cached else index.images

    def resume(self, begun_with: Mapping[str, Any]) -> None:
        """Read the last epoch of an unfinished training; ConfigError if that had other settings or data."""
        if not (self.folder / STATE).is_file():
            return
        stored = torch.load(self.folder / STATE, map_location=self.device, weights_only=True)
        for name, value in begun_with.items():
            if (before := stored["begun_with"].get(name)) != value:
                values = f"{name} {before}, which is now {value}"
                raise ConfigError(
                    f"{self.folder} holds an unfinished training with {values}: delete it to begin anew."
                )
        self.model.load_state_dict(stored["model"])
        self.optimizer.load_state_dict(stored["optimizer"])
        self.epochs = [(auc, loss) for auc, loss in stored["epochs"]]
        logger.info("going on after epoch %d in %s", len(self.epochs), self.folder)

    def fit(self, begun_with: Mapping[str, Any]) -> None:
        """Train until patience or the epochs end; each best epoch is written at once."""
        settings = self.settings
        while len(self.epochs) < settings.epochs:
            if (scores := self._scores()) and len(scores) - 1 - int(np.argmax(scores)) >= settings.patience:
                break
            trained = self.train_epoch(len(self.epochs))
            logits, labels = self._validate(), self.index.labels[self.validation]
            if not np.isfinite(logits).all():
                raise TrainingError(f"weights are not finite: lower lr, which is {settings.lr}.")
            before = self._scores()
            self.epochs.append(auc_and_loss(logits, labels))
            if self._scores()[-1] > max(before, default=-np.inf):
                self._save_best(HeldOut(logits, labels, self.index.owners[self.validation]))
            content = {"begun_with": begun_with, "epochs": self.epochs, "model": self.model.state_dict()}
            buffer = BytesIO()
            torch.save({**content, "optimizer": self.optimizer.state_dict()}, buffer)
            write_file(self.folder / STATE, buffer.getvalue())
            said = "epoch %d of %d: training loss %.4f, AUC %.4f, loss %.4f"
            logger.info(said, len(self.epochs), settings.epochs, trained, *self.epochs[-1])

    def _scores(self) -> list[float]:
        """Return the validation score of each epoch; the highest is the best."""
        if self.settings.select_by == "loss":
            return [-round(loss, DIGITS) for _, loss in self.epochs]
        return [round(auc, DIGITS) - 1e-6 * round(loss, DIGITS) for auc, loss in self.epochs]  # an AUC soon reaches 1

    def order(self, epoch: int) -> np.ndarray:
        """Return the numbers of the training's frames in the order of an epoch."""
        generator, count = np.random.default_rng((self.settings.seed, epoch)), len(self.training)
        if self.settings.balance != "sampling":
            return generator.permutation(self.training)
        shares = self.balance[self.index.labels[self.training].astype(int)]  # successes as often, with replacement
        return generator.choice(self.training, count, p=shares / shares.sum())

    def loader(self, numbers: np.ndarray, batch_size: int) -> DataLoader:
        batches = FrameBatches(self.read, self.index.labels, numbers, batch_size)
        return DataLoader(batches, batch_size=None, num_workers=self.settings.num_workers)

    def train_epoch(self, epoch: int) -> float:
        """Train for an epoch; return the mean loss of its steps."""
        settings, losses = self.settings, []
        own = np.random.SeedSequence([settings.seed, epoch]).generate_state(1)
        torch.manual_seed(int(own[0]))  # so that a training that goes on is as one that was never interrupted
        self.model.train()
        batches = self.loader(self.order(epoch), settings.batch_size)
        for batch in tqdm(batches, f"epoch {epoch + 1}", unit="batch", disable=None):
            labels = batch["labels"].to(self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=settings.bf16):
                logits = self.model(self._inputs(batch, settings.augment)).float() + self.offset
            loss = F.binary_cross_entropy_with_logits(logits, labels, self.weights[labels.long()])
            if not torch.isfinite(loss):
                raise TrainingError(f"the loss is {loss.item()}: lower lr, which is {settings.lr}.")
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return float(np.mean(losses))

    @torch.inference_mode()
    def _validate(self) -> np.ndarray:
        """Return the logits of the validation frames."""
        self.model.eval()
        scored: list[Tensor] = []
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.bf16):
            for batch in self.loader(self.validation, BATCH):
                scored.append(self.model(self._inputs(batch, False)).double().cpu())
        return torch.cat(scored).numpy()

    def _inputs(self, batch: Inputs, augmented: bool) -> Inputs:
        if FEATURES in batch:
            return {FEATURES: batch[FEATURES].to(self.device)}
        images = {key: model_input(frames, self.device) for key, frames in batch.items() if key != "labels"}
        return {key: augment(frames) for key, frames in images.items()} if augmented else images

    def _save_best(self, held_out: HeldOut) -> None:
        settings = self.settings
        threshold = choose_threshold(held_out, settings.target_fpr, settings.max_false_fires, settings.min_precision)
        metrics = figures(held_out, threshold)
        reason = disqualification(metrics, settings.max_false_fires, settings.min_precision)
        metrics |= {
            "epoch": len(self.epochs),
            "validation_frames": len(held_out.labels),
            "validation_successes": int(held_out.labels.sum()),
        }
        update = {
            "threshold": float(expit(threshold)),
            "metrics": metrics,
            "qualified": reason is None,
            "unqualified_because": reason,
        }
        save_classifier(settings.output_checkpoint, self.model, self.model.spec.model_copy(update=update))


def auc_and_loss(logits: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Return the area under the ROC curve and the mean binary cross-entropy of logits[N] for labels[N] of 0 and 1."""
    return float(roc_auc_score(labels, logits)), loss_of(logits, labels)


def cached_features(model: FrameClassifier, index: FrameIndex, file: Path) -> Callable[[Sequence[int]], Inputs]:
    """Return a reader of the encoder's output for frames, which is computed once into `file`, float32 [N,...]."""
    make_folder(file.parent)
    features: Any = None
    start = 0
    for batch in encoded(model.eval(), index.images, range(len(index))):
        if features is None:
            shape = (len(index), *batch.shape[1:])
            features = np.lib.format.open_memmap(file, mode="w+", dtype=np.float32, shape=shape)
        features[start : start + len(batch)] = batch.float().cpu().numpy()
        start += len(batch)
    return lambda numbers: {FEATURES: torch.from_numpy(features[np.asarray(numbers)])}


def augment(frames: Tensor) -> Tensor:
    """Shift and recolour frames float [B,C,H,W] in [0, 1], each at random, by torch's random numbers."""
    return random_colour(random_shift(frames))


def random_shift(frames: Tensor) -> Tensor:
    """Shift each frame by whole pixels, and repeat its border."""
    # Pad, then crop at a random offset, by indices: one gather for all frames.
    count, _, height, width = frames.shape
    reach = max(1, round(SHIFT * min(height, width)))
    padded = F.pad(frames, [reach] * 4, mode="replicate").permute(0, 2, 3, 1)
    rows, columns = (
        torch.randint(2 * reach + 1, (count, 1), device=frames.device) + torch.arange(side, device=frames.device)
        for side in (height, width)
    )
    batch = torch.arange(count, device=frames.device)[:, None, None]
    return padded[batch, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def random_colour(frames: Tensor) -> Tensor:
    """Change the brightness and the contrast of each frame."""
    brightness, contrast = 1 + COLOUR * (2 * torch.rand(2, len(frames), 1, 1, 1, device=frames.device) - 1)
    mean = frames.mean((1, 2, 3), keepdim=True)
    return (((frames - mean) * contrast + mean) * brightness).clamp(0, 1)
