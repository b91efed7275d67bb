"""The token of a request, and its check in constant time."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence

from fastapi import Request
from pydantic import SecretStr
from starlette.types import Scope

from vlmrm.serving.errors import Unauthorized


def token_of(request: Request) -> str:
    """Return the token of a request: Bearer, or of Basic the password, or the user where there is no password.

    Basic is for clients that can only put a token into the URL.
    """
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


def is_allowed(token: str, tokens: Sequence[SecretStr]) -> bool:
    """Return whether the token is among `tokens`, in constant time; where none of them is set, any is."""
    accepted = [secret.get_secret_value() for secret in tokens if secret.get_secret_value()]
    matches = [hmac.compare_digest(token.encode(), secret.encode()) for secret in accepted]  # no early exit
    return any(matches) or not accepted


def require_token(token: str, tokens: Sequence[SecretStr]) -> None:
    """Raise Unauthorized unless the token is allowed."""
    if not is_allowed(token, tokens):
        raise unauthorized()


def unauthorized() -> Unauthorized:
    return Unauthorized("a token is needed: send it as Authorization: Bearer TOKEN.")


def client_of(scope: Scope) -> str:
    """Return the client of a request, for fair shares: a digest of its token, or the address that it comes from."""
    token = token_of(Request(scope))
    if token:
        return hashlib.blake2b(token.encode(), digest_size=8).hexdigest()
    return (scope.get("client") or ("",))[0]
