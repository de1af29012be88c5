"""All objects that a pool shall have, in the order in which they are applied. Pure."""

from __future__ import annotations

from kvpool_operator import claims, objects
from kvpool_operator.assign import Assignment
from kvpool_operator.manifest import PoolObject, Settings
from kvpool_operator.objects import Object


def desired(
    pool: PoolObject, settings: Settings, assignment: Assignment, account_uid: str = ""
) -> list[Object]:
    """The same for the same input: applied twice, the second time changes nothing.

    `account_uid` is that of the daemons' ServiceAccount: when it is made anew, the tokens of all pods that
    run with it are void, and they have to be made anew too.
    """
    return [
        objects.service_account(pool, settings),
        objects.role(pool),
        objects.role_binding(pool, settings),
        objects.config_map(pool),
        objects.service(pool, settings),
        objects.network_policy(pool, settings),
        *objects.volumes(pool),
        *objects.claims(pool),
        *(objects.pool_node(pool, member) for member in assignment.members),
        *([claims.claim_template(pool), claims.pool_slice(pool)] if settings.driver else []),
        *claims.region_claims(pool, settings),
        objects.daemon_set(pool, settings, account_uid),
    ]
