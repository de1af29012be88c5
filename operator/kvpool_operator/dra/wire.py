"""The messages and services that the kubelet speaks with a DRA driver, described with protobuf's descriptors.

Names and numbers are those of the kubelet's API (k8s.io/kubelet pkg/apis: pluginregistration/v1, dra/v1,
dra-health/v1alpha1); a test compares them. Made in code: generated stubs are tied to the version of protobuf
that generated them, and a wheel has to work with the one that it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

Fields = tuple[tuple[str, int, str], ...]  # name, number, type: a scalar's, or "Message"; "*" many, "=" a map
Message = Any  # classes made at run time

_SCALARS = {"string": 9, "bool": 8, "int64": 3}
_MESSAGE, _ENUM = 11, 14


@dataclass(frozen=True, slots=True)
class Package:
    """One .proto file, as a table."""

    name: str
    messages: Mapping[str, Fields]
    enums: Mapping[str, tuple[str, ...]]
    service: str
    methods: Mapping[str, tuple[str, str]]  # name: request, response; "*" a stream of them


REGISTRATION = Package(
    name="pluginregistration",
    messages={
        "PluginInfo": (
            ("type", 1, "string"),
            ("name", 2, "string"),
            ("endpoint", 3, "string"),
            ("supported_versions", 4, "*string"),
        ),
        "RegistrationStatus": (("plugin_registered", 1, "bool"), ("error", 2, "string")),
        "RegistrationStatusResponse": (),
        "InfoRequest": (),
    },
    enums={},
    service="Registration",
    methods={
        "GetInfo": ("InfoRequest", "PluginInfo"),
        "NotifyRegistrationStatus": ("RegistrationStatus", "RegistrationStatusResponse"),
    },
)
DRA = Package(
    name="k8s.io.kubelet.pkg.apis.dra.v1",
    messages={
        "NodePrepareResourcesRequest": (("claims", 1, "*Claim"),),
        "NodePrepareResourcesResponse": (("claims", 1, "=NodePrepareResourceResponse"),),
        "NodePrepareResourceResponse": (("devices", 1, "*Device"), ("error", 2, "string")),
        "Device": (
            ("request_names", 1, "*string"),
            ("pool_name", 2, "string"),
            ("device_name", 3, "string"),
            ("cdi_device_ids", 4, "*string"),
        ),
        "NodeUnprepareResourcesRequest": (("claims", 1, "*Claim"),),
        "NodeUnprepareResourcesResponse": (("claims", 1, "=NodeUnprepareResourceResponse"),),
        "NodeUnprepareResourceResponse": (("error", 1, "string"),),
        "Claim": (("namespace", 1, "string"), ("uid", 2, "string"), ("name", 3, "string")),
    },
    enums={},
    service="DRAPlugin",
    methods={
        "NodePrepareResources": ("NodePrepareResourcesRequest", "NodePrepareResourcesResponse"),
        "NodeUnprepareResources": ("NodeUnprepareResourcesRequest", "NodeUnprepareResourcesResponse"),
    },
)
HEALTH = Package(
    name="v1alpha1",
    messages={
        "NodeWatchResourcesRequest": (),
        "DeviceIdentifier": (("pool_name", 1, "string"), ("device_name", 2, "string")),
        "DeviceHealth": (
            ("device", 1, "DeviceIdentifier"),
            ("health", 2, "HealthStatus"),
            ("last_updated_time", 3, "int64"),
        ),
        "NodeWatchResourcesResponse": (("devices", 1, "*DeviceHealth"),),
    },
    enums={"HealthStatus": ("UNKNOWN", "HEALTHY", "UNHEALTHY")},
    service="DRAResourceHealth",
    methods={"NodeWatchResources": ("NodeWatchResourcesRequest", "*NodeWatchResourcesResponse")},
)
# What GetInfo says that this driver speaks, the newest first.
SUPPORTED = ("v1.DRAPlugin", "v1alpha1.DRAResourceHealth")

_pool = descriptor_pool.DescriptorPool()


def _add(package: Package) -> None:
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{package.name}.proto", package=package.name, syntax="proto3"
    )
    for name, values in package.enums.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in package.messages.items():
        message = file.message_type.add(name=name)
        for field, number, kind in fields:
            many = kind[0] in "*="
            of = kind[1:] if many else kind
            made = message.field.add(name=field, number=number, label=3 if many else 1)
            if kind[0] == "=":
                entry = f"{''.join(part.title() for part in field.split('_'))}Entry"
                made.type, made.type_name = _MESSAGE, f".{package.name}.{name}.{entry}"
                nested = message.nested_type.add(name=entry)
                nested.options.map_entry = True
                nested.field.add(name="key", number=1, label=1, type=_SCALARS["string"])
                nested.field.add(
                    name="value", number=2, label=1, type=_MESSAGE, type_name=f".{package.name}.{of}"
                )
            elif of in _SCALARS:
                made.type = _SCALARS[of]
            else:
                made.type = _ENUM if of in package.enums else _MESSAGE
                made.type_name = f".{package.name}.{of}"
    _pool.Add(file)


for _package in (REGISTRATION, DRA, HEALTH):
    _add(_package)


def message(package: Package, name: str) -> Message:
    """The class of a message."""
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{package.name}.{name}"))


def handler(package: Package, functions: Mapping[str, Callable[..., Any]]) -> Any:
    """What a grpc server is given to serve the package's service by these functions, one for each method."""
    methods = {}
    for name, (request, response) in package.methods.items():
        made = (
            grpc.unary_stream_rpc_method_handler
            if response.startswith("*")
            else grpc.unary_unary_rpc_method_handler
        )
        methods[name] = made(
            functions[name],
            request_deserializer=message(package, request).FromString,
            response_serializer=lambda answer: answer.SerializeToString(),
        )
    return grpc.method_handlers_generic_handler(f"{package.name}.{package.service}", methods)


def call(channel: Any, package: Package, method: str) -> Any:
    """The method of a server at the other end of `channel`, to be called with a request."""
    response = package.methods[method][1]
    many = response.startswith("*")
    return (channel.unary_stream if many else channel.unary_unary)(
        f"/{package.name}.{package.service}/{method}",
        request_serializer=lambda asked: asked.SerializeToString(),
        response_deserializer=message(package, response.lstrip("*")).FromString,
    )
