"""What happens around every request: limits before it, headers on it, a count after it."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvpool.api import problem
from kvpool.api.metrics import ApiMetrics

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})
CALLERS_MAX = 10_000  # whose rate is remembered
# The page shows nothing from elsewhere, and nobody else may frame it.
SECURITY_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)


@dataclass(frozen=True, slots=True)
class Limit:
    """Requests a second that one address may send for long, and how many at once."""

    per_second: float = 500.0
    burst: int = 1000


class RateLimiter:
    """A bucket of tokens for each address; those that asked longest ago are forgotten first."""

    def __init__(self, limit: Limit, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, when

    def wait_s(self, address: str) -> float:
        """0 when the request may pass, else after how long the next one may."""
        now = self._clock()
        tokens, at = self._buckets.pop(address, (float(self._limit.burst), now))
        tokens = min(float(self._limit.burst), tokens + max(0.0, now - at) * self._limit.per_second)
        passes = tokens >= 1.0
        self._buckets[address] = (tokens - 1.0 if passes else tokens, now)
        if len(self._buckets) > CALLERS_MAX:
            self._buckets.popitem(last=False)
        return 0.0 if passes else (1.0 - tokens) / self._limit.per_second


class Guard:
    """ASGI middleware around the application.

    `hosts`: the names by which it may be asked; None for any. On loopback it is open to every process of the
    machine, a browser's pages among them: without this a page elsewhere could have its name point to
    127.0.0.1, and read along.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: ApiMetrics,
        limiter: RateLimiter,
        hosts: Iterable[str] | None = None,
    ) -> None:
        self._app, self._metrics, self._limiter = app, metrics, limiter
        self._hosts = None if hosts is None else frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 500

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *_headers_for(scope["path"])]
            await send(message)

        refusal = self._refusal(scope)
        try:
            await (refusal or self._app)(scope, receive, sending)
        finally:
            route = scope.get("route")
            took = time.perf_counter() - began
            self._metrics.request(getattr(route, "path", "other"), status, took)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        path = scope["path"]
        if self._hosts is not None:
            given = next((value for name, value in scope["headers"] if name == b"host"), b"").decode(
                "latin-1"
            )
            if host_name(given) not in self._hosts:
                detail = "this is not a name of this API; ask it as localhost, or start it with --allow-host"
                return problem.response(421, detail, path)
        client = scope.get("client")
        wait_s = self._limiter.wait_s(client[0] if client else "unknown")
        if wait_s and path not in ("/healthz", "/readyz"):
            retry = {"Retry-After": str(max(1, round(wait_s)))}
            return problem.response(429, "too many requests from this address; wait a moment", path, retry)
        return None


def host_name(header: str) -> str:
    """The name in a Host header, without its port."""
    if header.startswith("["):
        return header.partition("]")[0] + "]"
    return header.partition(":")[0].lower()


def _headers_for(path: str) -> Iterable[tuple[bytes, bytes]]:
    # FastAPI's own page of the description needs scripts from elsewhere; it is not served (see app).
    if path.startswith("/v1") or path in ("/metrics", "/healthz", "/readyz"):
        return (*SECURITY_HEADERS, (b"cache-control", b"no-cache"), (b"vary", b"authorization"))
    return SECURITY_HEADERS
