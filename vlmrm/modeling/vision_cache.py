"""A bounded cache on disk for the features of images from a frozen vision tower and merger: `vision_cache_dir`.

One safetensors file per image, named by a hash of all that the features depend on: the image's pixels and grid, and
the weights, configuration and types of the tower. So nothing is ever stale, and any number of runs, ranks, sweeps and
scorers may share a folder: files are written atomically, and the features of a missing or broken one are computed
again. Once the folder is full, the least recently used files are removed first.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn
from transformers import PreTrainedConfig
from transformers.integrations import is_deepspeed_zero3_enabled

from vlmrm.batching.caches import ByteCache
from vlmrm.batching.media import DistinctMedia, parts_of, select
from vlmrm.errors import ConfigError
from vlmrm.files import make_folder, plain_write_errors, write_file
from vlmrm.modeling.vision import FeatureForm, Features

logger = logging.getLogger("vlmrm")

# A full cache is emptied to KEEP of its limit. Each process looks at the folder's size whenever it has written CHECK
# of the limit: ten processes that write at once stay within it.
KEEP, CHECK = 0.9, 0.01


@dataclass
class FeatureCache:
    """Keep features in the memory of a scorer with fixed weights; a cache `behind` it, on disk, is asked second.

    Media without keys of their content are not kept.
    """

    cache: ByteCache
    behind: VisionCache | None = None

    def identify(self, modules: Sequence[nn.Module], config: PreTrainedConfig) -> None:
        if self.behind is not None:
            self.behind.identify(modules, config)

    def features(self, media: DistinctMedia, run: Callable[[DistinctMedia], list[Features]]) -> list[Features]:
        run = run if self.behind is None else partial(self.behind.features, run=run)
        if (keys := media.get("keys")) is None:
            return run(media)
        found: list[Features | None] = [self.cache.get(("features", key)) for key in keys]
        missing = [index for index, features in enumerate(found) if features is None]
        for index, features in zip(missing, run(select(media, missing)) if missing else (), strict=True):
            found[index] = features
            if not features.form.constants:  # what a tower also gives is not an image's
                kept = Features([layer.clone() for layer in features.layers], features.form)  # no part of a larger one
                self.cache.put(("features", keys[index]), kept, kept.layers)
        return [features for features in found if features is not None]


class VisionCache:
    """Features of images in `directory`, at most `gigabytes` (10⁹ bytes) of them."""

    def __init__(self, directory: str | Path, gigabytes: float):
        if not gigabytes > 0:
            raise ConfigError(f"vision_cache_gb is {gigabytes}: it must be more than 0.")
        self.directory = Path(directory)
        self.limit = int(gigabytes * 1e9)
        self._tower_hash: str | None = None
        self._warned = False
        make_folder(self.directory, "vision_cache_dir")
        with plain_write_errors(self.directory, "vision_cache_dir"):
            with tempfile.TemporaryFile(dir=self.directory):
                pass
            self._evict()

    def identify(self, modules: Sequence[nn.Module], config: PreTrainedConfig) -> None:
        """Hash the weights and the configuration of what encodes images on the first call; the tower is first.

        Under ZeRO-3 all ranks gather each weight for it, so all must call it at the same point: in their first batch,
        with images or without, after a checkpoint to resume from was loaded.
        """
        if self._tower_hash is None:
            self._dtype = next(modules[0].parameters()).dtype
            self._tower_hash = _hash_of(modules, config)

    def features(self, media: DistinctMedia, run: Callable[[DistinctMedia], list[Features]]) -> list[Features]:
        """Return the features of each distinct medium, with one `run` for those not cached.

        A medium that is in the batch twice is computed once. `identify` comes first.
        """
        device = next(iter(media["tensors"].values())).device
        autocast = torch.is_autocast_enabled(device.type)  # the tower computes in its own type, and in that of it
        compute_type = f"{self._dtype} {torch.get_autocast_dtype(device.type) if autocast else 'as it is'}"
        # Hashed in the type in which the tower reads them.
        on_cpu = {
            name: tensor.to("cpu", self._dtype if tensor.is_floating_point() else None)
            for name, tensor in media["tensors"].items()
        }
        parts = parts_of({**media, "tensors": on_cpu})
        with ThreadPoolExecutor(max_workers=min(len(parts), os.cpu_count() or 1)) as pool:  # hashing holds no lock
            keys = list(pool.map(lambda tensors: self._key(tensors, compute_type), parts))
        distinct = list(dict.fromkeys(keys))
        stored = {key: self._load(key) for key in distinct}
        by_key = {
            key: Features([layer.to(device) for layer in features.layers], features.form)
            for key, features in stored.items()
            if features
        }
        missing = [keys.index(key) for key in distinct if key not in by_key]
        if missing:
            for i, features in zip(missing, run(select(media, missing)), strict=True):
                by_key[keys[i]] = features
                self._store(keys[i], features)
        return [by_key[key] for key in keys]

    def _key(self, tensors: Mapping[str, torch.Tensor], compute_type: str) -> str:
        digest = sha256(f"{self._tower_hash} {compute_type} ".encode())
        for name, tensor in tensors.items():
            digest.update(f"{name} {list(tensor.shape)} ".encode())
            digest.update(_bytes(tensor))
        return digest.hexdigest()

    def _path(self, key: str) -> Path:
        return self.directory / key[:2] / f"{key}.safetensors"

    def _load(self, key: str) -> Features | None:
        """Return the stored features; None where there are none, or they are broken."""
        path = self._path(key)
        try:
            with safe_open(path, framework="pt") as file:
                layers = [file.get_tensor(str(i)) for i in range(len(file.keys()))]
                about = json.loads((file.metadata() or {}).get("about", "{}"))
                intact = about.get("crc32") == _checksum(layers)
            os.utime(path)  # the time of its last use, by which files are removed
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, RuntimeError) as error:
            # safe_open opens a file twice: of one that another process evicts in between, torch says RuntimeError.
            if isinstance(error, RuntimeError) and not path.exists():
                return None
            self._warn("%s cannot be read (%s): its features are computed anew", path, error)
            return None
        if not intact:
            self._warn("%s is broken: its features are computed anew", path)
        return Features(layers, FeatureForm.from_json(about["form"])) if intact else None

    def _store(self, key: str, features: Features) -> None:
        path = self._path(key)
        tensors = {str(i): layer.detach().cpu().contiguous() for i, layer in enumerate(features.layers)}
        try:
            path.parent.mkdir(exist_ok=True)
            about = {"crc32": _checksum(tensors.values()), "form": features.form.to_json()}
            content = save(tensors, {"about": json.dumps(about)})  # in one, as safetensors orders them at random
            write_file(path, content, durable=False)
            self._written += len(content)
            if self._written > CHECK * self.limit:
                self._evict()
        except (OSError, ConfigError) as error:
            self._warn("features of images will be computed again: %s", error)

    def _evict(self) -> None:
        """Remove the least recently used files of a folder over its limit."""
        self._written = 0  # bytes written by this process since it last looked
        files = []
        for path in self.directory.glob("??/*"):
            with suppress(FileNotFoundError):  # another process may evict at the same time
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in files)
        if total > self.limit:
            for _, size, path in sorted(files):
                if total <= KEEP * self.limit:
                    break
                path.unlink(missing_ok=True)
                total -= size

    def _warn(self, *message: Any) -> None:
        """Warn once: a broken disk would fail for every image."""
        if not self._warned:
            logger.warning(*message)
            self._warned = True


# Of a configuration: its origin, its type, which keys have already, and what training changes.
NOT_OF_VISION = frozenset(
    (
        *("_name_or_path", "transformers_version", "dtype", "text_config", "architectures", "quantization_config"),
        *("num_labels", "id2label", "label2id", "problem_type", "reward_head", "reward_outputs", "use_cache"),
        *("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings"),
    )
)


def _hash_of(modules: Sequence[nn.Module], config: PreTrainedConfig) -> str:
    about = {name: value for name, value in config.to_dict().items() if name not in NOT_OF_VISION}
    about |= {name: {**value, "dtype": None} for name, value in about.items() if isinstance(value, dict)}
    digest = sha256(json.dumps(about, sort_keys=True, default=str).encode())
    for module in modules:
        for name, weight in (*module.named_parameters(), *module.named_buffers()):
            with _gathered(weight):
                digest.update(f"{name} {weight.dtype} {list(weight.shape)} ".encode())
                digest.update(_bytes(weight.detach().cpu()))
    return digest.hexdigest()


def _gathered(weight: torch.Tensor) -> AbstractContextManager:
    """Gather a weight that ZeRO-3 has partitioned over the ranks."""
    if not is_deepspeed_zero3_enabled():
        return nullcontext()
    from deepspeed import zero

    return zero.GatheredParameters([weight])


def _checksum(features: Iterable[torch.Tensor]) -> str:
    checksum = 0
    for layer in features:
        checksum = zlib.crc32(_bytes(layer), checksum)
    return f"{checksum:08x}"


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a CPU tensor of any type (numpy has no bfloat16)."""
    return memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
