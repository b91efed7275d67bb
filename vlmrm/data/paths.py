"""Where a row's media paths lead: rewritten, made absolute, kept inside `image_root`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from vlmrm.data.media import check_inside, local_path


@dataclass(frozen=True)
class PathRules:
    """Turns a reference as a row writes it into one that `open_image` and `open_video` take.

    `folder` is what relative paths are relative to. Paths must stay inside `root` where one is given.
    `rewrites` are (old prefix, new prefix) pairs; the first that fits is applied.
    """

    folder: str
    root: str | None = None
    rewrites: tuple[tuple[str, str], ...] = ()

    def __call__(self, reference: Any) -> Any:
        if isinstance(reference, (str, os.PathLike)):
            return self._resolve(os.fspath(reference))
        if isinstance(reference, tuple):
            return tuple(map(self, reference))
        return reference

    def _resolve(self, path: str) -> str:
        if path.startswith("data:"):
            return path
        for old, new in self.rewrites:
            if path.startswith(old):
                path = new + path[len(old) :]
                break
        if path.startswith(("http://", "https://")):
            return path
        path = os.path.normpath(os.path.join(self.folder, local_path(path)))
        if self.root is not None:
            check_inside(path, self.root)
        return path
