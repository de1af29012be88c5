"""The API that the other tests of this folder stand on."""

from __future__ import annotations

from kube.apiserver import ApiServer


def test_apiserver_object_is_created_read_and_refused(apiserver: ApiServer, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": "1"}}
    assert apiserver.create(path, body).ok
    assert apiserver.get("configmap", "c", "-n", namespace)["data"] == {"a": "1"}
    again = apiserver.create(path, body)
    assert (again.code, again.body["reason"]) == (409, "AlreadyExists")
    unknown = apiserver.create(path, {**body, "metadata": {"name": "d"}, "date": {}})
    assert 'unknown field "date"' in unknown.message


def test_apiserver_apply_over_another_managers_field_is_a_conflict(
    apiserver: ApiServer, namespace: str
) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps/c"
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": "1"}}
    assert apiserver.apply(path, body, manager="one").ok
    other = apiserver.apply(path, {**body, "data": {"a": "2"}}, manager="two", force=False)
    assert (other.code, other.body["reason"]) == (409, "Conflict")
