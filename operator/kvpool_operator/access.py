"""Who may read pools, as Kubernetes says: TokenReview for who asks, SubjectAccessReview for what they may."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from kvpool.api.access import CHALLENGE, Caller, bearer
from kvpool.api.guard import Limit, RateLimiter
from kvpool.api.problem import ApiError
from kvpool_operator import client
from kvpool_operator.client import UNREACHABLE, Cluster

log = logging.getLogger("kvpool.api")

KNOWN_S = 60.0  # how long an answer is good for: a right that was taken away is felt after that
UNKNOWN_S = 10.0
CACHED_MAX = 10_000
TOKEN_MAX = 16 * 1024
# Whoever sends one wrong token after the other must not have the API server review them all.
REVIEWS = Limit(per_second=50.0, burst=100)
# Of one caller, wherever they ask from: behind an ingress all have one address.
CALLS = Limit()

V = TypeVar("V")


class _Cache(Generic[V]):
    """Answers, each for a while; the oldest go first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: OrderedDict[Hashable, tuple[float, V]] = OrderedDict()

    def get(self, key: Hashable) -> V | None:
        until, value = self._kept.get(key, (0.0, None))
        return value if until > self._clock() else None

    def put(self, key: Hashable, value: V, for_s: float) -> None:
        self._kept.pop(key, None)
        self._kept[key] = (self._clock() + for_s, value)
        if len(self._kept) > CACHED_MAX:
            self._kept.popitem(last=False)


class KubernetesAccess:
    """Asks the cluster. Tokens are kept as digests only, and are in no message."""

    def __init__(
        self, cluster: Callable[[], Cluster | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cluster = cluster
        self._callers: _Cache[Caller | str] = _Cache(clock)  # a text is why the token was refused
        self._rights: _Cache[bool] = _Cache(clock)
        self._reviews = RateLimiter(REVIEWS, clock)
        self._calls = RateLimiter(CALLS, clock)

    async def who(self, authorization: str | None) -> Caller:
        token = bearer(authorization)
        if len(token) > TOKEN_MAX:
            raise ApiError(401, "this token is too long to be one of the cluster's", CHALLENGE)
        key = hashlib.sha256(token.encode(errors="replace")).digest()
        known = self._callers.get(key)
        if known is None:
            known = await self._review(token)
            self._callers.put(key, known, KNOWN_S if isinstance(known, Caller) else UNKNOWN_S)
        if isinstance(known, str):
            raise ApiError(401, known, CHALLENGE)
        wait_s = self._calls.wait_s(known.name)
        if wait_s:
            retry = {"Retry-After": str(max(1, round(wait_s)))}
            raise ApiError(429, "too many requests of this caller; wait a moment", retry)
        return known

    async def may_read(self, caller: Caller, namespace: str | None) -> bool:
        key = (caller, namespace)
        known = self._rights.get(key)
        if known is None:
            known = await self._may(caller, namespace)
            self._rights.put(key, known, KNOWN_S if known else UNKNOWN_S)
        return known

    async def _review(self, token: str) -> Caller | str:
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}}
        status = await self._ask("/apis/authentication.k8s.io/v1/tokenreviews", body)
        user = status.get("user") or {}
        if status.get("authenticated") is not True or not user.get("username"):
            return "the cluster does not know this token; 'kubectl create token' makes one"
        extra = user.get("extra") or {}
        return Caller(
            name=str(user["username"]),
            groups=tuple(user.get("groups") or ()),
            uid=str(user.get("uid") or ""),
            extra=tuple(sorted((str(name), tuple(values)) for name, values in extra.items())),
        )

    async def _may(self, caller: Caller, namespace: str | None) -> bool:
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": caller.name,
                "groups": list(caller.groups),
                "uid": caller.uid,
                "extra": {name: list(values) for name, values in caller.extra},
                "resourceAttributes": {
                    "group": "kvpool.dev",
                    "resource": "kvpools",
                    "verb": "list",
                    "namespace": namespace or "",
                },
            },
        }
        status = await self._ask("/apis/authorization.k8s.io/v1/subjectaccessreviews", body)
        return status.get("allowed") is True

    async def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        wait_s = self._reviews.wait_s("reviews")
        if wait_s:
            raise ApiError(503, "too many tokens are being checked; ask again", {"Retry-After": "1"})
        cluster = self._cluster()
        try:
            if cluster is None:
                raise ConnectionError("no connection yet")
            answer = await cluster.post(path, body)
        except (*UNREACHABLE, client.ApiError) as error:
            log.warning("review_failed path=%s error=%r", path, str(error) or type(error).__name__)
            raise ApiError(
                503, "the cluster cannot be asked who may read this; ask again", {"Retry-After": "2"}
            ) from None
        return dict(answer.get("status") or {})
