"""Repeat work beside the service's requests; no error ends it in silence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import NoReturn

logger = logging.getLogger("vlmrm")


async def repeat(
    what: str, work: Callable[[], Awaitable[object]], pause: float, errors: MutableMapping[str, str]
) -> NoReturn:
    """Do `work`, and again `pause` seconds after its end, until cancelled; a round that raises does not end it.

    Args:
        what: of `work`, for messages, such as "following models".
        errors: says under `what` why the last round has failed, until one has not.
    """
    while True:
        try:
            await work()
            if errors.pop(what, None) is not None:
                logger.info("%s works again", what)
        except Exception as error:
            message = f"{what} fails ({type(error).__name__}) and is tried again: the log of the service says more."
            if errors.get(what) != message:
                logger.exception("%s fails, and is tried again", what)
            errors[what] = message
        await asyncio.sleep(pause)
