"""Who may ask: tokens in the `Authorization` header, compared in constant time."""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Sequence

from fastapi import Request
from pydantic import SecretStr

from vlmrm.serving.refusals import Unauthorized


def token_of(request: Request) -> str:
    """The token of a request: Bearer; or, for clients that know URLs alone, Basic's password, or its user alone."""
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            user, _, password = base64.b64decode(value, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return ""
        return password or user
    return ""


def opens(given: str, tokens: Sequence[SecretStr]) -> bool:
    """Whether the token is one of `tokens`; where none of them is set, everyone who reaches the service may ask."""
    wanted = [token.get_secret_value() for token in tokens if token.get_secret_value()]
    matches = [hmac.compare_digest(given.encode(), token.encode()) for token in wanted]  # all, in equal time
    return any(matches) or not wanted


def check(given: str, tokens: Sequence[SecretStr]) -> None:
    """Raises Unauthorized unless `given` opens what `tokens` guard."""
    if not opens(given, tokens):
        raise unauthorized()


def unauthorized() -> Unauthorized:
    """Return the refusal of a request without a token, or with a wrong one."""
    return Unauthorized("a token is needed: send it as Authorization: Bearer TOKEN.")
