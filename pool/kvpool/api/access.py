"""Who may read what: everybody on loopback, whoever knows a token, or as a cluster says."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from kvpool.api.problem import ApiError

CHALLENGE = {"WWW-Authenticate": 'Bearer realm="kvpool"'}


class Caller(NamedTuple):
    """Who asks: `name` for limits and logs, never a token; `groups` as the cluster knows them."""

    name: str
    groups: tuple[str, ...] = ()
    uid: str = ""
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()


class Access(Protocol):
    """Decides who may read pools. A namespace of None stands for all of them.

    `who` raises ApiError 401 for who is not known, 503 when it cannot be found out now.
    """

    async def who(self, authorization: str | None) -> Caller: ...
    async def may_read(self, caller: Caller, namespace: str | None) -> bool: ...


async def readable(access: Access, caller: Caller, namespaces: Iterable[str]) -> frozenset[str] | None:
    """The namespaces that the caller may read; None for all."""
    if await access.may_read(caller, None):
        return None
    return frozenset([n for n in sorted(set(namespaces)) if await access.may_read(caller, n)])


class OpenAccess:
    """Everybody may read everything: on loopback."""

    async def who(self, authorization: str | None) -> Caller:
        return Caller("anonymous")

    async def may_read(self, caller: Caller, namespace: str | None) -> bool:
        return True


class TokenAccess:
    """Whoever knows the token may read everything: behind an ingress."""

    def __init__(self, token: str) -> None:
        if len(token) < 16:
            raise ValueError("the API's token is too short; use 16 characters or more")
        self._digest = hashlib.sha256(token.encode()).digest()

    async def who(self, authorization: str | None) -> Caller:
        given = bearer(authorization)
        if hmac.compare_digest(hashlib.sha256(given.encode()).digest(), self._digest):
            return Caller("token")
        raise ApiError(
            401, "this token is not known; give the API's token as 'Authorization: Bearer ...'", CHALLENGE
        )

    async def may_read(self, caller: Caller, namespace: str | None) -> bool:
        return True


def bearer(authorization: str | None) -> str:
    """The token of an Authorization header. Raises: ApiError when there is none."""
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise ApiError(401, "a token is needed: give it as 'Authorization: Bearer ...'", CHALLENGE)
    return token.strip()
