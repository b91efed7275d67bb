"""Processed images on disk for the length of one program, so that each is opened and processed once for many models.

Files are the program's own: a folder of its own, gone when it ends. Any process of it may write and read.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save

from vlmrm.errors import ConfigError
from vlmrm.files import write_file
from vlmrm.rendering import ProcessedMedia

logger = logging.getLogger("vlmrm")


@dataclass
class MediaStore:
    """Keeps what each process puts in, up to `limit` bytes of it; what comes after that is processed anew each time.

    `name` tells apart what processes the images: another processor, or other limits, make other pixels.
    """

    folder: Path
    limit: int
    name: str
    used: int = 0

    def get(self, key: str) -> ProcessedMedia | None:
        path = self._path(key)
        if not path.exists():
            return None
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["about"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        return ProcessedMedia(about["key"], about["kind"], tensors, about["replacement"])

    def put(self, key: str, media: ProcessedMedia) -> None:
        size = sum(tensor.nbytes for tensor in media.tensors.values())
        if self.used + size > self.limit:
            return
        about = {"key": media.key, "kind": media.kind, "replacement": media.replacement}
        tensors = {name: tensor.contiguous() for name, tensor in media.tensors.items()}
        try:
            write_file(self._path(key), save(tensors, {"about": json.dumps(about)}), durable=False)
        except ConfigError as error:
            self.limit = 0
            logger.warning("no more processed images are kept: %s", error)
        else:
            self.used += size

    def _path(self, key: str) -> Path:
        return self.folder / f"{sha256(f'{self.name} {key}'.encode()).hexdigest()}.safetensors"
