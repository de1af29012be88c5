"""One pool, once: look, decide, apply, tell. All of the operator's changes to a cluster are made here."""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvpool.errors import ManifestError
from kvpool_operator import kinds
from kvpool_operator.assign import Assignment, Member, Node, assign
from kvpool_operator.cache import Cache, PoolKey
from kvpool_operator.claims import not_to_be_had
from kvpool_operator.client import ApiError, Cluster
from kvpool_operator.compare import is_applied, marked
from kvpool_operator.desired import desired
from kvpool_operator.events import Events, now_text
from kvpool_operator.kinds import CHILDREN, Kind, kind_of
from kvpool_operator.manifest import PoolObject, Settings
from kvpool_operator.names import (
    API_VERSION,
    COHERENCE_VERIFIED,
    DEGRADED,
    DRAINING,
    EVENT_REMOVAL_INCOMPLETE,
    FINALIZER,
    INVALID_SPEC,
    READY,
)
from kvpool_operator.objects import service_account
from kvpool_operator.status import Observed, invalid_status, status
from kvpool_operator.workqueue import Again

log = logging.getLogger("kvpool.operator")

STATUS_S = 3.0  # counters are written at most this often; conditions at once
REMOVAL_S = 120.0  # how long a deleted pool waits for its nodes to remove their files
REMOVAL_POLL_S = 2.0
EVENT_TIME_DIGITS = len("2026-01-01T00:0")
# True is bad news for these, and False for the others.
BAD_WHEN_TRUE = (DEGRADED, DRAINING)

Object = dict[str, Any]


@dataclass
class Reconciler:
    """Makes the cluster as the KVPools say, one pool at a time; any number of pools beside each other."""

    cluster: Cluster
    cache: Cache
    events: Events
    settings: Settings
    written_at: dict[PoolKey, float] = field(default_factory=dict)

    async def reconcile(self, key: PoolKey) -> None:
        """Bring the pool `key` to what its object says.

        Raises:  Again to be called again; anything else is a failure, to be retried.
        """
        body = self.cache.get(kinds.POOL, *key)
        if body is None:
            await self._sweep(key)
            self.written_at.pop(key, None)
            return
        deleting = bool(body["metadata"].get("deletionTimestamp"))
        try:
            pool = PoolObject.from_object(body)
        except ManifestError as error:
            await self._invalid(key, body, str(error), deleting)
            return
        if deleting:
            await self._finalize(key, body, pool)
            return
        if problem := not_to_be_had(pool, self.settings):
            await self._invalid(key, body, problem, deleting)
            return
        if FINALIZER not in (body["metadata"].get("finalizers") or []):
            body = await self._set_finalizer(body, present=True)
        nodes, members = self._look(key, pool)
        assignment = assign(nodes, members, shared=pool.shared, hosts=pool.spec.hosts)
        trouble = ""
        if pool.raw.get("paused"):
            assignment = Assignment(members=members)
        else:
            trouble = await self._apply(key, pool, assignment)
        await self._tell(key, body, pool, assignment, trouble)
        if trouble:
            raise RuntimeError(trouble)

    def _look(self, key: PoolKey, pool: PoolObject) -> tuple[list[Node], list[Member]]:
        nodes = [Node.from_object(node) for node in self.cache.nodes(pool.raw.get("nodeSelector") or {})]
        members = [Member.from_object(node) for node in self.cache.of_pool(kinds.POOL_NODE, key)]
        return nodes, members

    async def _apply(self, key: PoolKey, pool: PoolObject, assignment: Assignment) -> str:
        """Apply what differs, delete what is too much; returns what could not be done, as a sentence."""
        account = marked(service_account(pool, self.settings))
        problems = await self._ensure(key, [account])
        uid = str((self._live(account) or account)["metadata"].get("uid", ""))
        wanted = [marked(self._as_made(body)) for body in desired(pool, self.settings, assignment, uid)]
        problems += await self._ensure(key, [body for body in wanted if body != account])
        kept = {(body["kind"], body["metadata"]["name"]) for body in wanted}
        kept |= {("KVPoolNode", f"{pool.name}-{member.index}") for member in assignment.waiting}
        for kind in reversed(CHILDREN):
            for live in self.cache.of_pool(kind, key):
                name = live["metadata"]["name"]
                if (kind.name, name) in kept or live["metadata"].get("deletionTimestamp"):
                    continue
                if not _is_ours(live, pool.uid):
                    continue
                await self._delete(kind, live)
                log.info("deleted pool=%s/%s kind=%s name=%s", *key, kind.name, name)
        if not problems:
            return ""
        return f"{len(problems)} objects could not be applied; the first: {problems[0]}"

    def _as_made(self, wanted: Object) -> Object:
        """An object whose spec can never change, with the spec that it has."""
        live = self._live(wanted) if kind_of(wanted) in kinds.FIXED else None
        if live is None or live["metadata"].get("deletionTimestamp"):
            return wanted
        return {**wanted, "spec": live["spec"]}

    async def _ensure(self, key: PoolKey, wanted: list[Object]) -> list[str]:
        """Apply what differs; returns what was refused, a sentence each."""
        problems = []
        for body in wanted:
            kind, name = kind_of(body), body["metadata"]["name"]
            if is_applied(body, self._live(body)):
                continue
            try:
                self.cache.put(kind, await self.cluster.apply(body, kind))
                log.info("applied pool=%s/%s kind=%s name=%s", *key, kind.name, name)
            except ApiError as error:
                problems.append(f"{kind.name} {name}: {error.message}")
        return problems

    def _live(self, wanted: Mapping[str, Any]) -> Object | None:
        metadata = wanted["metadata"]
        return self.cache.get(kind_of(wanted), metadata.get("namespace") or "", metadata["name"])

    async def _tell(
        self,
        key: PoolKey,
        body: Object,
        pool: PoolObject,
        assignment: Assignment,
        error: str,
        *,
        deleting: bool = False,
    ) -> None:
        seen = Observed(
            nodes=self.cache.of_pool(kinds.POOL_NODE, key),
            daemon_set=next(iter(self.cache.of_pool(kinds.DAEMON_SET, key)), None),
            assignment=assignment,
            error=error,
            deleting=deleting,
            away=frozenset(n.name for n in map(Node.from_object, self.cache.nodes({})) if not n.ready),
        )
        before = body.get("status") or {}
        made = status(pool, seen, before, now_text())
        await self._say_changes(body, before, made)
        await self._say_nodes(body, seen)
        await self._write(key, body, before, made)

    async def _write(self, key: PoolKey, body: Object, before: Mapping[str, Any], made: Object) -> None:
        """Write the status: conditions at once, numbers every few seconds, what is known already never."""
        if made == before:
            return
        numbers_only = made["conditions"] == before.get("conditions") and made.get("nodes") == before.get(
            "nodes"
        )
        since_s = time.monotonic() - self.written_at.get(key, float("-inf"))
        if numbers_only and since_s < STATUS_S:
            raise Again(STATUS_S - since_s)
        metadata = {"name": body["metadata"]["name"], "namespace": body["metadata"]["namespace"]}
        written = await self.cluster.apply(
            {"apiVersion": API_VERSION, "kind": "KVPool", "metadata": metadata, "status": made},
            kinds.POOL,
            "status",
        )
        self.written_at[key] = time.monotonic()
        self.cache.put(kinds.POOL, written)

    async def _say_changes(self, body: Object, before: Mapping[str, Any], made: Object) -> None:
        known = {c["type"]: c for c in before.get("conditions") or []}
        for condition in made["conditions"]:
            old = known.get(condition["type"])
            name, now = condition["type"], condition["status"]
            if now == "Unknown" or (old is not None and old["status"] == now):
                continue
            bad = now == ("True" if name in BAD_WHEN_TRUE else "False")
            reason, message = condition["reason"], condition["message"]
            if name not in (READY, DEGRADED, DRAINING, COHERENCE_VERIFIED):
                continue
            # What is so from the first moment on is news only when it is bad; and no pool is ready at once.
            if old is None and (not bad or (name == READY and reason != INVALID_SPEC)):
                continue
            once = f"{name}/{now}/{condition['lastTransitionTime']}"
            await self.events.say(body, reason, message, kind="Warning" if bad else "Normal", once=once)

    async def _say_nodes(self, body: Object, seen: Observed) -> None:
        """What daemons report: they may not post events themselves."""
        for node in seen.nodes:
            name = node["spec"]["nodeName"]
            for event in (node.get("status") or {}).get("events") or []:
                # What happens again and again is said once in ten minutes: "at" without its last digits.
                when = str(event.get("at", ""))[:EVENT_TIME_DIGITS]
                once = f"{event.get('reason', '')}/{event.get('tier', '')}/{when}/{name}"
                tier = f" tier {event['tier']}" if event.get("tier") else ""
                message = f"{name}{tier}: {event.get('message', '')}"
                reason = str(event.get("reason", "NodeEvent"))
                warning = event.get("type") == "Warning"
                await self.events.say(
                    body, reason, message, kind="Warning" if warning else "Normal", once=once
                )

    async def _invalid(self, key: PoolKey, body: Object, message: str, deleting: bool) -> None:
        if deleting:  # what it had cannot be told from its spec; what carries its name goes
            await self._sweep(key)
            await self._set_finalizer(body, present=False)
            return
        generation = int(body["metadata"].get("generation", 0))
        before = body.get("status") or {}
        made = invalid_status(message, generation, before, now_text())
        await self._say_changes(body, before, made)
        await self._write(key, body, before, made)

    async def _finalize(self, key: PoolKey, body: Object, pool: PoolObject) -> None:
        """Let a deleted pool go: with `Delete` after its nodes have removed their files, or the deadline."""
        if FINALIZER not in (body["metadata"].get("finalizers") or []):
            return
        if pool.spec.deletion_policy == "Delete":
            await self._remove_files(key, body, pool)
        await self._sweep(key)
        await self._set_finalizer(body, present=False)
        log.info("released pool=%s/%s policy=%s", *key, pool.spec.deletion_policy)

    async def _remove_files(self, key: PoolKey, body: Object, pool: PoolObject) -> None:
        nodes, members = self._look(key, pool)
        assignment = assign(nodes, members, shared=pool.shared, hosts=pool.spec.hosts, removing=True)
        alive = {node.name for node in nodes if node.ready and not node.gone}
        left = [member.node for member in assignment.members if not member.removed]
        if not left:
            return
        if _age_s(body["metadata"]["deletionTimestamp"]) > REMOVAL_S or not alive.intersection(left):
            message = (
                f"Files of the pool stay on {', '.join(left)}: no answer from there. Remove "
                f"{pool.node_folder} and the files of its shared tiers by hand."
            )
            await self.events.say(body, EVENT_REMOVAL_INCOMPLETE, message, kind="Warning", once="removal")
            return
        error = await self._apply(key, pool, assignment)
        await self._tell(key, body, pool, assignment, error, deleting=True)
        raise Again(REMOVAL_POLL_S)

    async def _set_finalizer(self, body: Object, *, present: bool) -> Object:
        metadata = body["metadata"]
        others = [name for name in metadata.get("finalizers") or [] if name != FINALIZER]
        patch = {
            "metadata": {
                "finalizers": [*others, FINALIZER] if present else others,
                "resourceVersion": metadata["resourceVersion"],  # a change in between is looked at first
            }
        }
        try:
            patched = await self.cluster.merge(kinds.POOL, metadata["namespace"], metadata["name"], patch)
        except ApiError as error:
            if error.code == 404:
                return body
            if error.code == 409:
                raise Again(0.2) from None
            raise
        if not present and not patched["metadata"].get("finalizers"):
            return patched  # it is gone now; the watch will say so
        self.cache.put(kinds.POOL, patched)
        return patched

    async def _sweep(self, key: PoolKey) -> None:
        """Delete what no garbage collector does: what a pool that is gone has outside of its namespace."""
        everything = [(kind, live) for kind in CHILDREN for live in self.cache.of_pool(kind, key)]
        for kind, live in reversed(everything):
            metadata = live["metadata"]
            if not metadata.get("ownerReferences") and not metadata.get("deletionTimestamp"):
                await self._delete(kind, live)

    async def _delete(self, kind: Kind, live: Mapping[str, Any]) -> None:
        metadata = live["metadata"]
        await self.cluster.delete(kind, metadata.get("namespace"), metadata["name"], metadata["uid"])


def _is_ours(live: Mapping[str, Any], uid: str) -> bool:
    """Whether an object was made for this very pool. One that lies elsewhere has no owner to tell."""
    owners = live["metadata"].get("ownerReferences") or []
    if not owners:
        labels = live["metadata"].get("labels") or {}
        return labels.get("app.kubernetes.io/managed-by") == "kvpool-operator"
    return any(owner.get("uid") == uid for owner in owners)


def _age_s(timestamp: str) -> float:
    then = datetime.datetime.fromisoformat(timestamp.replace("Z", "+00:00"))
    return (datetime.datetime.now(datetime.timezone.utc) - then).total_seconds()
