"""Whatever is parsed: junk, mutated documents, deep nesting, huge numbers, multiplying aliases, wrong types.

The outcome is a value or a KvpoolError with a sentence, never another exception and never a hang.
`make test-fuzz` tries many more than the quick suite (KVPOOL_FUZZ_EXAMPLES).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from children import children, until
from kvpool import paths
from kvpool.cli import app
from kvpool.daemon import snapshot
from kvpool.errors import KvpoolError, ManifestError, NamespaceError
from kvpool.keys import KeyBatch
from kvpool.quantity import BYTES_MAX, PATTERN, parse_quantity
from kvpool.region import Region, _description
from kvpool.spec import PoolSpec
from kvpool_connector.fingerprint import fingerprint
from kvpool_connector.settings import Settings, SettingsError
from strategies import contents, keys_of, namespace, small_geometry

EXAMPLES = int(os.environ.get("KVPOOL_FUZZ_EXAMPLES", "30"))
pytestmark = pytest.mark.slow
many = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
HUGE = 10**5000  # Python refuses to print it

VALID = """\
apiVersion: kvpool.dev/v1alpha1
kind: KVPool
metadata: {name: fuzzed, labels: {a: b}}
spec:
  hosts: 2
  nodeSelector: {kvpool.dev/member: "true"}
  tiers:
  - {name: dram, medium: DRAM, capacity: 8Mi, source: {path: /nowhere/dram}, extentSize: 1Mi}
  - {name: cxl, medium: CXL, capacity: 16Mi, shared: true, coherence: software, source: {path: /nowhere/cxl}}
  eviction: {highWatermark: 95, lowWatermark: 90}
  verify: always
  deletionPolicy: Retain
"""
# What YAML can say that a manifest never does.
SNIPPETS = [
    '!!int ""',
    "!!int x",
    "!!float x",
    '!!float ""',
    "!!bool x",
    "!!timestamp x",
    "!!binary '%'",
    "!!null x",
    "!!set {a, b}",
    "!!omap [a: 1]",
    "!!pairs [a]",
    "!!python/object:os.system [x]",
    "!!str {a: b}",
    "!!map x",
    "!!seq {a: b}",
    "&a [*a]",
    "*nobody",
    "<<: {hosts: 3}",
    "<<: 1",
    "{<<: [1, 2]}",
    "? [a, b]\n: c",
    "? {a: b}\n: c",
    "0x" + "f" * 6000,
    "9" * 4999,
    "0b1",
    "0o9",
    "1:60:60",
    "1e999",
    "-.inf",
    ".nan",
    "2001-99-99",
    "2001-01-01T99:99:99Z",
    "\x00",
    "\ufeff",
    "\ud7ff",
    "%YAML 9.9\n---\n",
    "---\n",
    "...\n",
    "'",
    '"\\',
    "|",
    "\t",
    "- - - -",
    "{",
    "]",
    ": :",
    "yes",
    "~",
    "-1",
    "64Gi",
    "1.5.5Gi",
    "9" * 40 + "Ti",
]
text = st.text(max_size=30)
junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([1 << 64, -(1 << 64), 10**400, -1])
    | st.floats()
    | text
    | st.binary(max_size=8)
    | st.sampled_from(["64Gi", "DRAM", "always"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(text | st.integers() | st.none(), inner, max_size=3)
    ),
    max_leaves=6,
)


def accepted(call: Callable[[], object], *, refusal: type[KvpoolError] = KvpoolError) -> bool:
    """Whether it was accepted; a refusal says something."""
    try:
        call()
    except refusal as error:
        sentence = str(error)
    else:
        return True
    assert sentence.strip(), "refused without a word"
    return False


@st.composite
def mutated(draw: st.DrawFn, valid: str) -> str:
    """A valid text with pieces left out, said twice, exchanged or replaced."""
    out = valid
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(out)))
        end = min(len(out), start + draw(st.sampled_from([0, 0, 1, 3, 10, 60])))
        piece = draw(st.sampled_from(SNIPPETS) | text | st.just(out[start:end] * 2))
        out = out[:start] + piece + out[end:]
    return out


def values_replaced(valid: Any, data: st.DataObject) -> Any:
    """A valid document with junk in the place of one to three of its parts."""
    document = json.loads(json.dumps(valid))
    for _ in range(data.draw(st.integers(1, 3))):
        here = document
        while True:
            keys = list(here) if isinstance(here, dict) else list(range(len(here)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if isinstance(here[key], dict | list) and here[key] and data.draw(st.booleans()):
                here = here[key]
                continue
            if data.draw(st.integers(0, 4)) == 0:
                del here[key]
            else:
                here[key] = data.draw(junk)
            break
    return document


# -- quantities ------------------------------------------------------------------------------------------


@given(text | junk | st.from_regex(PATTERN) | st.integers())
@example("9" * 2_000_000)
@example("0." + "0" * 400 + "1Ti")
@example("1." + "0" * 40 + "1")
@many
def test_quantity_is_bytes_or_a_sentence(value: object) -> None:
    try:
        amount = parse_quantity(value)
    except ValueError as error:
        sentence = str(error)
    else:
        assert 0 < amount <= BYTES_MAX
        return
    assert sentence.endswith("."), sentence
    assert len(sentence) < 1000, "a message as long as the mistake"


@pytest.mark.parametrize("value", [HUGE, -HUGE, [HUGE], {HUGE: HUGE}], ids=["huge", "minus", "list", "map"])
def test_numbers_that_cannot_be_printed_are_refused_with_a_sentence(value: object) -> None:
    with pytest.raises(ValueError, match=r"\.$"):
        parse_quantity(value)
    manifest = yaml.safe_load(VALID)
    for at in ("hosts", "verify", "tiers", "eviction", "nodeSelector", "deletionPolicy", "unknown"):
        wrong = manifest | {"spec": manifest["spec"] | {at: value}}
        with pytest.raises(ManifestError, match=r"[.?]"):
            PoolSpec.from_object(wrong)
    for at in ("name", "medium", "capacity", "shared", "source", "coherence", "minBlockSize"):
        tier = manifest["spec"]["tiers"][0] | {at: value}
        with pytest.raises(ManifestError, match=r"[.?]"):
            PoolSpec.from_object(manifest | {"spec": manifest["spec"] | {"tiers": [tier]}})


# -- manifests -------------------------------------------------------------------------------------------


@given(mutated(VALID) | text | st.sampled_from(SNIPPETS))
@many
def test_manifest_text_is_read_or_refused(source: str) -> None:
    accepted(lambda: PoolSpec.from_text(source), refusal=ManifestError)


@pytest.mark.parametrize("snippet", SNIPPETS)
@pytest.mark.parametrize(
    "place", ["hosts: 2", "capacity: 8Mi", "always", "name: fuzzed", "{kvpool.dev/member"]
)
def test_manifest_with_what_yaml_can_say_anywhere_is_read_or_refused(snippet: str, place: str) -> None:
    head, _, tail = place.rpartition(" ")
    replaced = VALID.replace(place, f"{head} {snippet}".strip())
    assert replaced != VALID or snippet == tail
    accepted(lambda: PoolSpec.from_text(replaced), refusal=ManifestError)


@given(st.data())
@many
def test_manifest_object_with_junk_is_read_or_refused(data: st.DataObject) -> None:
    document = values_replaced(yaml.safe_load(VALID), data)
    accepted(lambda: PoolSpec.from_object(document), refusal=ManifestError)


@given(junk)
@many
def test_any_object_is_read_or_refused_as_a_manifest(document: object) -> None:
    accepted(lambda: PoolSpec.from_object(document), refusal=ManifestError)


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? ", "&a [", "!!seq [", "'", "a:\n "])
@pytest.mark.parametrize("depth", [50, 65, 500, 20_000])
def test_manifest_nested_deep_is_refused_soon(opening: str, depth: int) -> None:
    start = time.monotonic()
    assert not accepted(lambda: PoolSpec.from_text(opening * depth), refusal=ManifestError)
    assert time.monotonic() - start < 20


@given(st.binary(max_size=200) | mutated(VALID).map(lambda t: t.encode(errors="surrogatepass")))
@many
def test_manifest_file_is_read_or_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "pool.yaml"
    path.write_bytes(data)
    accepted(lambda: PoolSpec.from_file(path), refusal=ManifestError)


@pytest.mark.parametrize("name", ["", ".", "/", "missing", "a" * 5000, "\0", "/dev/null", "/proc/self/mem"])
def test_manifest_at_a_path_that_cannot_be_read_is_refused(name: str) -> None:
    assert not accepted(lambda: PoolSpec.from_file(name), refusal=ManifestError)


# -- what a machine keeps of a pool ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A runtime directory with a pool whose daemon lives (its lock is held); its regions cannot be seen."""
    folder = tmp_path_factory.mktemp("run")
    before = {name: os.environ.get(name) for name in (paths.RUNTIME_ENV, paths.HOST_ENV)}
    os.environ[paths.RUNTIME_ENV] = str(folder)
    os.environ.pop(paths.HOST_ENV, None)
    pool = paths.ensure_pool_dir("fuzzed")
    paths.manifest_path("fuzzed").write_text(VALID)

    def hold() -> None:
        fd = os.open(paths.daemon_lock_path("fuzzed", 0), os.O_RDWR | os.O_CREAT)
        fcntl.lockf(fd, fcntl.LOCK_EX)
        (pool / "held").touch()
        time.sleep(3600)

    with children() as start:
        start(hold, timeout_s=7200)
        until((pool / "held").exists)
        yield folder
    for name, value in before.items():
        if value is not None:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)


@functools.cache
def valid_report() -> dict[str, Any]:
    """What a daemon reports of two regions with a few blocks."""
    spec = PoolSpec.from_text(VALID)
    tiers = []
    for tier in spec.tiers:
        path = Path(os.environ[paths.RUNTIME_ENV]) / tier.name
        Region.format(path, small_geometry(8, hosts=2 if tier.shared else 1))
        with Region.attach(path) as region:
            keys = keys_of(namespace(1024), range(3))
            region.store(keys, contents(keys))
            region.record(3, 2)
            tiers.append(snapshot.take(tier, paths.region_path(spec, tier, 0), 0, region))
    return {
        **snapshot.pool_object("fuzzed", tiers),
        "host": 0,
        "node_name": "n",
        "pid": 1,
        "started_at": 1.0,
        "updated_at": time.time(),
        "ready": True,
        "skipped_tiers": {},
        "scrub": {"dram": {"checked": 1, "bad": 0, "rounds": 0, "next_slot": 0}},
        "problems": ["none"],
    }


def command(*arguments: str, stdin: bytes | None = None) -> int:
    """Runs `kvpool`: it ends with an exit code, never with an exception."""
    result = CliRunner().invoke(app, arguments, input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 1, 2)
    assert result.exit_code == 0 or result.output.strip(), "it failed without a word"
    return result.exit_code


def shown(report: bytes) -> None:
    paths.report_path("fuzzed", 0).write_bytes(report)
    for arguments in (("status", "fuzzed"), ("status", "fuzzed", "-o", "json"), ("explain", "fuzzed")):
        command(*arguments)


def test_report_of_a_living_daemon_is_shown(machine: Path) -> None:
    paths.report_path("fuzzed", 0).write_text(json.dumps(valid_report()))
    result = CliRunner().invoke(app, ["status", "fuzzed", "-o", "json"])
    (pool,) = json.loads(result.stdout)["pools"]
    assert [tier["blocks"] for tier in pool["tiers"]] == [3, 3]


@given(st.data())
@many
def test_report_with_junk_is_shown_or_left_out(machine: Path, data: st.DataObject) -> None:
    document = values_replaced(valid_report(), data)
    with contextlib.suppress(ValueError, TypeError):  # what JSON cannot say
        shown(json.dumps(document, skipkeys=True).encode())


@given(st.binary(max_size=60) | mutated('{"updated_at": 1, "problems": [], "tiers": []}').map(str.encode))
@example(b"[" * 100_000)
@example(b'{"updated_at": 1' + b"0" * 400 + b', "problems": []}')
@example(b'{"updated_at": NaN, "problems": []}')
@example(b'{"updated_at": Infinity, "problems": []}')
@example(b'{"updated_at": 1, "problems": [1, {}]}')
@many
def test_report_of_any_bytes_is_shown_or_left_out(machine: Path, data: bytes) -> None:
    shown(data)


@given(st.binary(max_size=100) | mutated(VALID).map(lambda t: t.encode(errors="surrogatepass")))
@many
def test_kept_manifest_of_any_bytes_is_read_or_refused(machine: Path, data: bytes) -> None:
    kept = paths.ensure_pool_dir("other") / paths.MANIFEST_NAME
    kept.write_bytes(data)
    try:
        command("status", "other")
        command("explain", "other")
        command("fsck", "other")
    finally:
        kept.unlink()


# -- the command line ------------------------------------------------------------------------------------

words = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20),
    st.sampled_from(
        ["fuzzed", ".", "/", "./x", "..", "../..", "/dev/null", "/proc/self/mem", "a" * 300, "/" + "a" * 5000]
    ),
    st.text("./-_a*[\n ", min_size=1, max_size=10),
)


@given(st.sampled_from(["status", "explain", "fsck", "scrub", "dump", "validate"]), words, st.booleans())
@many
def test_targets_of_commands_are_found_or_refused(machine: Path, name: str, word: str, file: bool) -> None:
    command(name, *(["-f", word] if file or name == "validate" else ["--", word]))


@given(st.binary(max_size=100) | mutated(VALID).map(lambda t: t.encode(errors="surrogatepass")))
@many
def test_manifest_on_standard_input_is_read_or_refused(machine: Path, data: bytes) -> None:
    command("validate", "-f", "-", stdin=data)


@given(words | st.from_regex(PATTERN), words | st.from_regex(r"[0-9]{1,30}", fullmatch=True))
@many
def test_sizes_of_format_are_read_or_refused(machine: Path, capacity: str, hosts: str) -> None:
    """Into a folder that does not exist, so nothing can come of it."""
    command("format", "/nowhere/region", f"--capacity={capacity}", f"--hosts={hosts}")


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=10))
@example("9" * 5000)
@example("٣")
@many
def test_host_of_the_environment_is_a_number_or_refused(machine: Path, value: str) -> None:
    os.environ[paths.HOST_ENV] = value
    try:
        accepted(paths.default_host)
        accepted(lambda: Settings.parse({"pool": "p"}), refusal=SettingsError)
        command("status", "fuzzed")
    finally:
        del os.environ[paths.HOST_ENV]


# -- engines ---------------------------------------------------------------------------------------------

VALID_SETTINGS = {
    "pool": "p",
    "host": 0,
    "load": "auto",
    "min_tokens": 3,
    "store": "prompt",
    "tenant": "t",
    "weights_fingerprint": "w",
    "weights_check": "full",
    "staging": "auto",
    "prefault": True,
}


@given(
    st.dictionaries(st.sampled_from(sorted(VALID_SETTINGS)) | text | st.integers(), junk, max_size=4),
    st.data(),
)
@many
def test_connector_settings_are_read_or_refused(config: dict[Any, Any], data: st.DataObject) -> None:
    accepted(lambda: Settings.parse({"pool": "p"} | config), refusal=SettingsError)
    accepted(lambda: Settings.parse(values_replaced(VALID_SETTINGS, data)), refusal=SettingsError)


@pytest.mark.parametrize("name", sorted(VALID_SETTINGS))
@pytest.mark.parametrize("value", [HUGE, -HUGE, [HUGE], {HUGE: HUGE}], ids=["huge", "minus", "list", "map"])
def test_connector_settings_with_numbers_that_cannot_be_printed(name: str, value: Any) -> None:
    accepted(lambda: Settings.parse(VALID_SETTINGS | {name: value}), refusal=SettingsError)


def safetensors(header: bytes, content: bytes = b"x" * 64) -> bytes:
    return len(header).to_bytes(8, "little") + header + content


HEADER = '{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "__metadata__": {"k": "v"}}'


@given(st.binary(max_size=40) | mutated(HEADER).map(lambda h: safetensors(h.encode(errors="surrogatepass"))))
@example(safetensors(b"[" * 5000))
@example(safetensors(b'{"a": {"data_offsets": [-9, 1e9]}}'))
@example(safetensors(b'{"a": {"data_offsets": [0, 1' + b"0" * 400 + b"]}}"))
@example(safetensors(b'{"a": {"data_offsets": ["x"]}, "b": 1}'))
@many
def test_weight_files_of_any_bytes_have_a_fingerprint(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    first = fingerprint([path], {})
    assert first == fingerprint([path], {})
    path.write_bytes(data + b"more")
    assert first != fingerprint([path], {})


@given(st.binary(max_size=100) | st.lists(st.binary(max_size=40), max_size=4))
@many
def test_block_hashes_of_any_length_are_keys_or_refused(hashes: bytes | list[bytes]) -> None:
    packed = hashes if isinstance(hashes, bytes) else b"".join(hashes)
    if accepted(lambda: KeyBatch.from_hashes(namespace(64), hashes), refusal=NamespaceError):
        assert len(packed) % 32 == 0


@given(st.text(max_size=100))
@example("[" * 894)
@example('{"a":' * 150)
@example("NaN")
@example("1" * 894)
@many
def test_description_of_a_namespace_is_read_or_shown_as_it_is(description: str) -> None:
    assert isinstance(_description(description), dict)
