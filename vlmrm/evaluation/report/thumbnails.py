"""Images as small data URIs, so that the report is one file."""

from __future__ import annotations

import base64
import io
import logging
from functools import cache
from pathlib import Path

from PIL import Image

from vlmrm.data.media import open_image
from vlmrm.errors import RowError

logger = logging.getLogger("vlmrm")

SIDE = 320  # pixels, the longer one


@cache
def thumbnail(path: str) -> str | None:
    """A JPEG of at most 320 x 320 pixels as a data URI; None, and a warning, where the image cannot be opened."""
    try:
        image = open_image(path)
    except RowError as error:
        logger.warning("The report lacks the image %s: %s", Path(path).name, error)
        return None
    image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=78, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
