"""What users write in the connector's configuration, and what they are told when it is wrong."""

from __future__ import annotations

import pytest

from kvpool_connector.settings import Settings, SettingsError


@pytest.fixture(autouse=True)
def no_host_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPOOL_HOST", raising=False)


def test_pool_alone_is_enough() -> None:
    settings = Settings.parse({"pool": "demo"})
    assert settings == Settings("demo")
    assert (settings.load, settings.store, settings.host, settings.min_tokens) == ("auto", "prompt", None, 0)


def test_everything_can_be_said() -> None:
    settings = Settings.parse(
        {
            "pool": "/etc/pool.yaml",
            "host": 3,
            "load": "async",
            "min_tokens": 512,
            "store": "all",
            "tenant": "red",
            "weights_fingerprint": "v7",
            "weights_check": "full",
            "staging": "always",
            "prefault": False,
        }
    )
    assert settings == Settings(
        "/etc/pool.yaml", 3, "async", 512, "all", "red", "v7", "full", "always", prefault=False
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "kv_connector_extra_config.pool: missing; write the name of a running pool"),
        ({"pool": ""}, "kv_connector_extra_config.pool: missing"),
        ({"pool": 7}, "kv_connector_extra_config.pool: 7 is not a string"),
        ({"pool": "p", "min_token": 1}, "min_token: not a setting; did you mean 'min_tokens'?"),
        ({"pool": "p", "load": "lazy"}, "load: 'lazy' is none of auto, sync, async"),
        ({"pool": "p", "min_tokens": -1}, "min_tokens: -1 is not a number of tokens"),
        ({"pool": "p", "min_tokens": True}, "min_tokens: True is not a number of tokens"),
        ({"pool": "p", "prefault": "yes"}, "prefault: 'yes' is neither true nor false"),
        ({"pool": "p", "host": 64}, "kv_connector_extra_config.host: 64 is not a host number"),
        ({"pool": "p", "host": "one"}, "host: 'one' is not a host number"),
    ],
)
def test_mistake_is_named(config: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.parse(config)
    assert message in str(caught.value)


def test_host_comes_from_the_environment_when_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_HOST", "5")
    assert Settings.parse({"pool": "p"}).host == 5
    assert Settings.parse({"pool": "p", "host": 0}).host == 0
    monkeypatch.setenv("KVPOOL_HOST", "five")
    with pytest.raises(SettingsError, match="KVPOOL_HOST: 'five' is not a host number"):
        Settings.parse({"pool": "p"})
