"""The cluster from the command line.

python -m cluster check            what this machine lacks; exit code 77 when something is missing
python -m cluster build            the programs and the base images
python -m cluster up | stop | down
python -m cluster status
python -m cluster load ARCHIVE...  images onto all nodes
python -m cluster node NAME on | off | cut | join
python -m cluster node NAME start | stop | kill | restart SERVICE
python -m cluster node NAME run COMMAND...
python -m cluster run COMMAND...   where the cluster's addresses answer, with KUBECONFIG and PATH set
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from . import images, needs, programs
from .cluster import Cluster
from .places import ClusterError, Places, say


def main(arguments: list[str]) -> int:
    word, rest = (arguments[0], arguments[1:]) if arguments else ("help", [])
    places = Places()
    if word == "check":
        return check(places)
    if word == "build":
        programs.build(places)
        images.make_base(places)
    elif word == "image":
        print(images.make_kvpool(places))
    elif word == "up":
        missing = check(places)
        if missing:
            return missing
        programs.build(places)
        Cluster(places).up(images.make_base(places))
        say(f"kubectl: KUBECONFIG={places.kubeconfig} ip netns exec {places.name} {places.programs}/kubectl")
    elif word in ("stop", "down"):
        getattr(Cluster(), word)()
    elif word == "status":
        cluster = Cluster()
        for name, machine in cluster.machines.items():
            print(name, "on" if machine.is_on() else "off")
        if cluster.is_up():
            print(cluster.kubectl("get", "nodes", "-o", "wide"), end="")
    elif word == "load":
        Cluster().load([Path(name) for name in rest])
    elif word == "node" and len(rest) > 1:
        return node(Cluster(), *rest)
    elif word == "run" and rest:
        environment = os.environ | {
            "KUBECONFIG": str(places.kubeconfig),
            "PATH": f"{places.programs}:{os.environ['PATH']}",
        }
        return subprocess.run(places.inside(*rest), env=environment, check=False).returncode
    else:
        print(__doc__)
        return 2
    return 0


def check(places: Places) -> int:
    missing = needs.missing(built=not programs.unbuilt(places))
    for sentence in missing:
        print(f"cluster: this machine lacks {sentence}", file=sys.stderr)
    return needs.CANNOT if missing else 0


def node(cluster: Cluster, name: str, word: str, *rest: str) -> int:
    if name not in cluster.machines:
        raise ClusterError(f"no machine {name}; there are {', '.join(cluster.machines)}")
    if word == "run":
        return subprocess.run(cluster.machines[name].command(*rest), check=False).returncode
    actions = {
        "on": cluster.power_on,
        "off": cluster.power_off,
        "cut": cluster.cut_network,
        "join": cluster.join_network,
        "start": cluster.start,
        "stop": cluster.stop_service,
        "kill": lambda machine, service: cluster.stop_service(machine, service, "KILL"),
        "restart": cluster.restart_service,
    }
    if word not in actions:
        raise ClusterError(f"no action {word}; there are {', '.join(actions)}, run")
    actions[word](name, *rest)  # type: ignore[operator]
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ClusterError as error:
        sys.exit(f"cluster: {error}")
