"""Helm in a process of its own: one request a line on stdin, one answer a line on stdout, both JSON.

Its library is Go, which takes over signal handlers and starts threads; a test process that forks, with a
SIGBUS handler of its own, cannot have that inside of it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import helm_python


def answer(chart: helm_python.Chart, folder: str, request: dict[str, Any]) -> Any:
    values = request.get("values") or {}
    if request["do"] == "lint":
        return helm_python.lint(folder, values, strict=True, namespace="sys")
    chart.validate_schema(values)
    return chart.render(values, name=request["name"], namespace=request["namespace"])


def main(folder: str) -> None:
    with helm_python.Chart.load(folder) as chart:
        for line in sys.stdin:
            try:
                said: dict[str, Any] = {"result": answer(chart, folder, json.loads(line))}
            except helm_python.HelmError as error:
                said = {"error": str(error)}
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
