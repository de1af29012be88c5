"""What a user writes in the engine's connector configuration, checked once."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from kvpool import KvpoolError

HOST_VARIABLE = "KVPOOL_HOST"


class SettingsError(KvpoolError, ValueError):
    """This engine, model or configuration cannot be used with the pool; the message says what to set."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The keys of `kv_connector_extra_config`, with their defaults.

    pool: name of a running pool, or the path of its manifest.
    host: which shard of the shared tiers this process writes; if not given KVPOOL_HOST, else what the
        pool's daemon on this machine was assigned, else 0.
    load: `sync` loads inside the step that needs the blocks, `async` beside the running steps; `auto` picks.
    min_tokens: hits shorter than this are recomputed.
    store: `prompt` stores the blocks of prompts, `all` also those of generated tokens, `none` only reads.
    tenant: engines of different tenants do not see each other's blocks.
    weights_fingerprint: what tells these weights from others, when it cannot be computed from files.
    weights_check: `sampled` reads a few pages of every tensor, `full` reads every byte of every weight file.
    staging: `always` copies through a host buffer also where the cache is in host memory already.
    prefault: back the engine's cache in host memory with pages at start, huge ones where there are any.
    """

    pool: str
    host: int | None = None
    load: Literal["auto", "sync", "async"] = "auto"
    min_tokens: int = 0
    store: Literal["prompt", "all", "none"] = "prompt"
    tenant: str = ""
    weights_fingerprint: str | None = None
    weights_check: Literal["sampled", "full"] = "sampled"
    staging: Literal["auto", "always"] = "auto"
    prefault: bool = True

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Settings:
        """Raises SettingsError that names the key, what was expected and what to write."""
        known = {f.name for f in fields(cls)}
        for key in config:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise SettingsError(f"{_path(key)}: not a setting{hint} Known: {', '.join(sorted(known))}.")
        if not _text(config, "pool"):
            raise SettingsError(
                f"{_path('pool')}: missing; write the name of a running pool (see 'kvpool status') "
                "or the path of its manifest."
            )
        return cls(
            pool=_text(config, "pool"),
            host=_host(config),
            load=_choice(config, "load", ("auto", "sync", "async")),
            min_tokens=_count(config, "min_tokens"),
            store=_choice(config, "store", ("prompt", "all", "none")),
            tenant=_text(config, "tenant"),
            weights_fingerprint=_text(config, "weights_fingerprint") or None,
            weights_check=_choice(config, "weights_check", ("sampled", "full")),
            staging=_choice(config, "staging", ("auto", "always")),
            prefault=_flag(config, "prefault", True),
        )


def _path(key: object) -> str:
    return f"kv_connector_extra_config.{key}"


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python does not write numbers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 100 else text[:97] + "..."


def _text(config: Mapping[str, Any], key: str) -> str:
    value = config.get(key, "")
    if value is None:
        return ""
    if not isinstance(value, str):
        raise SettingsError(f"{_path(key)}: {_shown(value)} is not a string.")
    return value


def _choice(config: Mapping[str, Any], key: str, allowed: tuple[str, ...]) -> Any:
    value = config.get(key, allowed[0])
    if value not in allowed:
        raise SettingsError(f"{_path(key)}: {_shown(value)} is none of {', '.join(allowed)}.")
    return value


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SettingsError(f"{_path(key)}: {_shown(value)} is not a number of tokens (0 or more).")
    return value


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise SettingsError(f"{_path(key)}: {_shown(value)} is neither true nor false.")
    return value


def _host(config: Mapping[str, Any]) -> int | None:
    """The number from the configuration, else from the environment, else None (the pool's own default)."""
    value = config.get("host")
    where = _path("host")
    if value is None and HOST_VARIABLE in os.environ:
        where, value = HOST_VARIABLE, os.environ[HOST_VARIABLE]
    if value is None:
        return None
    try:
        number = int(str(value), 10)
    except ValueError:
        number = -1
    if isinstance(value, bool) or not 0 <= number < 64:
        raise SettingsError(
            f"{where}: {_shown(value)} is not a host number (0..63, below spec.hosts of the manifest)."
        )
    return number
