"""The arbiter: numbers are kept, shards move only for a reason that Kubernetes gives, epochs never repeat."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool_operator.assign import Assignment, Claim, Member, Node, Owner, assign


def ready(assignment: Assignment) -> list[Member]:
    """As if all daemons had done what they were told."""
    owner = {m.index: (m.index, 0) for m in assignment.members}
    for member in assignment.members:
        for claim in member.claims:
            owner[claim.shard] = (member.index, claim.epoch)
    owners = tuple(Owner(shard, host, epoch) for shard, (host, epoch) in sorted(owner.items()))
    return [replace(m, ready=True, owners=owners) for m in [*assignment.members, *assignment.waiting]]


def two() -> list[Member]:
    return ready(assign([Node("a"), Node("b")], [], shared=True, hosts=2))


def claims(assignment: Assignment) -> dict[int, tuple[Claim, ...]]:
    return {m.index: m.claims for m in assignment.members}


def test_new_nodes_get_numbers_in_the_order_of_their_names() -> None:
    made = assign([Node("b"), Node("a")], [], shared=True, hosts=4)
    assert [(m.index, m.node, m.state, m.claims) for m in made.members] == [
        (0, "a", "Active", ()),
        (1, "b", "Active", ()),
    ]


def test_a_number_is_kept_when_others_come_and_go() -> None:
    made = assign([Node("a"), Node("aa"), Node("b")], two(), shared=True, hosts=3)
    assert [(m.index, m.node) for m in made.members] == [(0, "a"), (1, "b"), (2, "aa")]


def test_more_nodes_than_hosts_are_homeless_only_where_a_tier_is_shared() -> None:
    nodes = [Node(name) for name in "abc"]
    assert assign(nodes, [], shared=True, hosts=2).homeless == ["c"]
    assert assign(nodes, [], shared=False, hosts=1).homeless == []


def test_a_silent_node_keeps_its_shard() -> None:
    members = [replace(m, ready=False) for m in two()]
    made = assign([Node("a"), Node("b", ready=False)], members, shared=True, hosts=2)
    assert claims(made) == {0: (), 1: ()}
    assert not made.waiting
    assert not made.leaving


def test_the_shard_of_a_cordoned_node_goes_to_a_ready_one_and_comes_back() -> None:
    drained = assign([Node("a"), Node("b", cordoned=True)], two(), shared=True, hosts=2)
    assert claims(drained) == {0: (Claim(1, 1),), 1: ()}
    assert [m.state for m in drained.members] == ["Active", "Draining"]
    assert drained.cordoned == ["b"]
    back = assign([Node("a"), Node("b")], ready(drained), shared=True, hosts=2)
    assert claims(back) == {0: (), 1: (Claim(1, 2),)}


def test_a_cordoned_node_keeps_its_shard_when_nobody_can_take_it() -> None:
    made = assign([Node("a", cordoned=True)], two()[:1], shared=True, hosts=2)
    assert claims(made) == {0: ()}


def test_a_gone_node_is_let_go_only_when_its_shard_has_a_new_owner() -> None:
    first = assign([Node("a")], two(), shared=True, hosts=2)
    assert first.gone == ["b"]
    assert claims(first) == {0: (Claim(1, 1),)}
    told = [replace(m, owners=(Owner(1, 0, 1, settled=False),)) for m in [*first.members, *first.waiting]]
    assert assign([Node("a")], told, shared=True, hosts=2).gone == ["b"]
    then = assign([Node("a")], ready(first), shared=True, hosts=2)
    assert [m.node for m in then.leaving] == ["b"]
    assert claims(then) == {0: (Claim(1, 1),)}, "what is settled is not done again"


def test_a_node_that_an_administrator_calls_out_of_service_is_gone() -> None:
    made = assign([Node("a"), Node("b", gone=True)], two(), shared=True, hosts=2)
    assert made.gone == ["b"]


def test_the_number_of_a_gone_node_is_free_again_and_its_new_node_takes_the_shard_back() -> None:
    first = ready(assign([Node("a")], two(), shared=True, hosts=2))
    gone = assign([Node("a")], first, shared=True, hosts=2)
    new = assign([Node("a"), Node("c")], [m for m in ready(gone) if m.node == "a"], shared=True, hosts=2)
    assert [(m.index, m.node) for m in new.members] == [(0, "a"), (1, "c")]
    assert claims(new) == {0: (Claim(1, 1),), 1: ()}, "not before its daemon runs"
    taken = assign([Node("a"), Node("c")], ready(new), shared=True, hosts=2)
    assert claims(taken) == {0: (), 1: (Claim(1, 2),)}


def test_a_claim_by_hand_counts_and_is_not_repeated() -> None:
    by_hand = [replace(m, owners=(Owner(0, 0, 0), Owner(1, 0, 7))) for m in two()]
    made = assign([Node("a"), Node("b")], by_hand, shared=True, hosts=2)
    assert claims(made) == {0: (), 1: (Claim(1, 8),)}


def test_a_pool_that_is_removed_asks_every_node_and_gives_no_new_numbers() -> None:
    made = assign([Node("a"), Node("b"), Node("c")], two(), shared=True, hosts=3, removing=True)
    assert [(m.node, m.state) for m in made.members] == [("a", "Removing"), ("b", "Removing")]
    assert made.homeless == []


def test_nodes_of_a_pool_without_a_shared_tier_neither_drain_nor_wait() -> None:
    made = assign([Node("a", cordoned=True)], two(), shared=False, hosts=1)
    assert [(m.node, m.state) for m in made.members] == [("a", "Active")]
    assert [m.node for m in made.leaving] == ["b"]


node_states = st.lists(
    st.tuples(st.sampled_from("abcd"), st.booleans(), st.booleans()), max_size=4, unique_by=lambda n: n[0]
)


@settings(max_examples=100)
@given(st.lists(st.tuples(node_states, st.booleans()), min_size=1, max_size=12))
def test_whatever_happens_to_nodes_each_shard_has_one_owner_and_each_epoch_is_new(
    history: list[tuple[list[tuple[str, bool, bool]], bool]],
) -> None:
    members: list[Member] = []
    given_epochs: dict[tuple[int, int], int] = {}  # (shard, epoch) -> host
    for states, obeyed in history:
        nodes = [Node(name, cordoned=cordoned, gone=gone) for name, cordoned, gone in states]
        made = assign(nodes, members, shared=True, hosts=3)
        assert len({m.index for m in made.members}) == len(made.members)
        assert len({m.node for m in made.members}) == len(made.members)
        owned = [claim.shard for m in made.members for claim in m.claims]
        assert len(owned) == len(set(owned)), "a shard has two heirs"
        for member in made.members:
            for claim in member.claims:
                host = given_epochs.setdefault((claim.shard, claim.epoch), member.index)
                assert host == member.index, "an epoch was given to two hosts"
        if not made.leaving:  # else there is a number for the homeless now
            again = assign(nodes, [*made.members, *made.waiting], shared=True, hosts=3)
            assert again == made, "the same input changes nothing"
        members = ready(made) if obeyed else [*made.members, *made.waiting]
