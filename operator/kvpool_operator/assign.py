"""Which node has which number, and who looks after which shard: the operator as the arbiter.

Pure: from the nodes of the cluster, and the KVPoolNodes as they are, to the KVPoolNodes as they shall be.
A shard changes hands only by a higher epoch (docs/protocol.md, adoption), and epochs are given here alone.
They never repeat: the next one is above all that any KVPoolNode, wanted or reported, has ever named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

State = Literal["Active", "Draining", "Removing"]
INDEX_MAX = 4096  # nodes of a pool that has no shared tier
GONE_TAINT = "node.kubernetes.io/out-of-service"  # an administrator says that the machine is off


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster. `gone`: Kubernetes, or an administrator, says that it does not run."""

    name: str
    ready: bool = True
    cordoned: bool = False
    gone: bool = False

    @classmethod
    def from_object(cls, body: Mapping[str, Any]) -> Node:
        spec, status = body.get("spec") or {}, body.get("status") or {}
        ready = any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for condition in status.get("conditions") or []
        )
        gone = any(taint.get("key") == GONE_TAINT for taint in spec.get("taints") or [])
        return cls(body["metadata"]["name"], ready, bool(spec.get("unschedulable")), gone)


@dataclass(frozen=True, slots=True)
class Claim:
    """A host's right to a shard that is not its own by birth, or is its own again."""

    shard: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Owner:
    """Who owns a shard, as a node reported it."""

    shard: int
    host: int
    epoch: int
    settled: bool = True


@dataclass(frozen=True, slots=True)
class Member:
    """One KVPoolNode: a node's number in the pool, and what it is to do."""

    index: int
    node: str
    state: State = "Active"
    claims: tuple[Claim, ...] = ()
    ready: bool = False  # as its daemon reports; False when nothing is heard of it
    owners: tuple[Owner, ...] = ()  # as its daemon reports
    removed: bool = False

    @classmethod
    def from_object(cls, body: Mapping[str, Any]) -> Member:
        spec, status = body["spec"], body.get("status") or {}
        owners = tuple(
            Owner(
                int(shard["shard"]),
                int(shard["owner"]),
                int(shard["epoch"]),
                bool(shard.get("settled", True)),
            )
            for tier in status.get("tiers") or []
            for shard in tier.get("shards") or []
        )
        return cls(
            index=int(body["metadata"]["name"].rpartition("-")[2]),
            node=spec["nodeName"],
            state=spec.get("state", "Active"),
            claims=tuple(Claim(int(c["shard"]), int(c["epoch"])) for c in spec.get("adopt") or []),
            ready=bool(status.get("ready")),
            owners=owners,
            removed=bool(status.get("removed")),
        )


@dataclass(frozen=True, slots=True)
class Assignment:
    """The members as they shall be, and what could not be had."""

    members: list[Member] = field(default_factory=list)
    leaving: list[Member] = field(default_factory=list)  # their KVPoolNodes can be deleted
    homeless: list[str] = field(default_factory=list)  # nodes that find no number
    cordoned: list[str] = field(default_factory=list)
    waiting: list[Member] = field(default_factory=list)  # gone; kept until somebody has adopted their shard

    @property
    def gone(self) -> list[str]:
        return sorted(member.node for member in self.waiting)


def assign(
    nodes: Sequence[Node], members: Sequence[Member], *, shared: bool, hosts: int, removing: bool = False
) -> Assignment:
    """Number the nodes, keep what is, hand over the shards of nodes that drain or are gone.

    `nodes` are those that the pool selects; `members` the KVPoolNodes that exist. `hosts` counts the shards
    of the shared tiers. With `removing`, all of them are to remove what the pool has on their node.
    """
    wanted = {node.name: node for node in sorted(nodes, key=lambda node: node.name) if not node.gone}
    kept: dict[int, Member] = {}
    seen: set[str] = set()
    lost: list[Member] = []
    for member in sorted(members, key=lambda member: member.index):
        if member.node in wanted and member.node not in seen:
            seen.add(member.node)
            kept[member.index] = replace(member, state=_state(wanted[member.node], shared, removing))
        else:
            lost.append(member)
    homeless: list[str] = []
    used = set(kept) | {member.index for member in lost}
    free = [index for index in range(hosts if shared else INDEX_MAX) if index not in used]
    if not removing:
        for name in wanted:
            if name in seen:
                continue
            if not free:
                homeless.append(name)
                continue
            index = free.pop(0)
            kept[index] = Member(index, name, _state(wanted[name], shared, removing))
    leaving = lost
    if shared and not removing:
        kept, leaving = _hand_over(kept, lost, hosts)
    return Assignment(
        members=[kept[index] for index in sorted(kept)],
        leaving=leaving,
        homeless=homeless,
        cordoned=sorted(m.node for m in kept.values() if m.state == "Draining"),
        waiting=[member for member in lost if member not in leaving],
    )


def _state(node: Node, shared: bool, removing: bool) -> State:
    if removing:
        return "Removing"
    return "Draining" if node.cordoned and shared else "Active"


def _hand_over(
    kept: dict[int, Member], lost: Sequence[Member], hosts: int
) -> tuple[dict[int, Member], list[Member]]:
    """Give each shard to who shall have it; returns the members, and the lost ones that nobody waits for."""
    everybody = [*kept.values(), *lost]
    claims: dict[int, list[Claim]] = {index: list(member.claims) for index, member in kept.items()}
    leaving: list[Member] = []
    lost_indices = {member.index for member in lost}
    for shard in range(hosts):
        owner, epoch = _recorded(shard, everybody)
        for index, held in claims.items():  # a member that was away may come back with a claim that is over
            current = Claim(shard, epoch) if index == owner else None
            claims[index] = [claim for claim in held if claim.shard != shard or claim == current]
        heir = _heir(shard, owner, kept, lost_indices, claims)
        if heir is not None and heir != owner:
            for index in claims:
                claims[index] = [claim for claim in claims[index] if claim.shard != shard]
            claims[heir].append(Claim(shard, epoch + 1))
            owner = heir
        for member in lost:
            if member.index == shard and owner != shard and _settled(shard, owner, kept):
                leaving.append(member)
    members = {
        index: replace(member, claims=tuple(sorted(claims[index], key=lambda claim: claim.shard)))
        for index, member in kept.items()
    }
    return members, leaving


def _recorded(shard: int, members: Iterable[Member]) -> tuple[int, int]:
    """Who owns a shard by the highest epoch that was ever given, and that epoch."""
    best = (0, shard)
    for member in members:
        found = [(claim.epoch, member.index) for claim in member.claims if claim.shard == shard]
        found += [(owner.epoch, owner.host) for owner in member.owners if owner.shard == shard]
        best = max([best, *found], key=lambda pair: pair[0])
    return best[1], best[0]


def _heir(
    shard: int,
    owner: int,
    kept: Mapping[int, Member],
    lost: set[int],
    claims: Mapping[int, list[Claim]],
) -> int | None:
    """Who shall own a shard; None leaves it where it is.

    Its own host when that serves. Another one only when Kubernetes says that the host is cordoned or gone: a
    daemon that is merely silent keeps its shard, for its engines may well write on.
    """
    home = kept.get(shard)
    if home is not None and home.state == "Active":
        # A host that comes back takes its shard when its daemon runs: until then the adopter goes on.
        return shard if owner == shard or home.ready else None
    if home is None and shard not in lost:
        return None  # nobody has this number: nothing was stored there, or it was handed over already
    holder = kept.get(owner)
    if owner != shard and holder is not None and holder.state == "Active":
        return owner
    able = [m for m in kept.values() if m.state == "Active" and m.ready and m.index != shard]
    if not able:
        return None
    return min(able, key=lambda member: (len(claims[member.index]), member.index)).index


def _settled(shard: int, owner: int, kept: Mapping[int, Member]) -> bool:
    """Whether the adopter has told that it looks after the shard."""
    holder = kept.get(owner)
    return holder is not None and any(
        known.shard == shard and known.host == owner and known.settled for known in holder.owners
    )
