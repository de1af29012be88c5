"""The dashboard in a real Chromium, with live data from a real pool: without errors, accessible.

KVPOOL_SCREENSHOTS=DIR keeps the screenshots (docs/images has those of the last time).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("playwright", reason="make test-api installs it")
pytest.importorskip("axe_playwright_python", reason="make test-api installs it")

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

from api.statuses import StillSource, pool
from kvpool.api import model, server
from kvpool.api.access import TokenAccess
from kvpool.api.service import Service
from kvpool.api.status import Readiness
from strategies import region_folder

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine; .ci/system --api installs it"),
]
MANIFEST = """
apiVersion: kvpool.dev/v1alpha1
kind: KVPool
metadata: {name: prefix-pool}
spec:
  tiers:
  - {name: dram, medium: DRAM, capacity: 32Mi, source: {path: MEDIA/dram}}
  - {name: cxl, medium: CXL, capacity: 64Mi, source: {path: MEDIA/cxl}}
"""
TOKEN = "correct-horse-battery"
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
FOCUSED = (
    """(() => { const e = document.activeElement; return e.id || e.value || e.className || e.tagName })()"""
)
TRAFFIC = """
import random, time
from kvpool import KeyBatch, Namespace, Pool, PrefillCurve
def space(dtype):
    return Namespace(model="org/some-model-8b", weights="3f9c", dtype=dtype, kv_layout="flat",
                     block_tokens=32, block_bytes=65536, hash_scheme="sha256")
chance, began = random.Random(1), time.time()
with Pool.open("prefix-pool") as pool:
    pool.store(KeyBatch.from_hashes(space("bfloat16"), [bytes([9] * 32)]), [bytes(65536)])
    while True:
        last = 700 + 900 * (int(time.time() - began) // 8 % 2)
        hashes = [chance.randrange(last).to_bytes(32, "big") for _ in range(16)]
        keys = KeyBatch.from_hashes(space("float16"), hashes)
        hits = pool.load(keys, [bytearray(65536) for _ in hashes]).hit_count
        pool.record_curve(PrefillCurve(120.0, 1.5, 500, True))
        pool.record_saved(space("float16"), hits * 32 * 120e-6, hits)
        pool.store(keys, [bytes(65536)] * 16)
        time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as playwright:
        # Its sandbox needs what root in a container seldom has; it sees our own page only.
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def live() -> Iterator[str]:
    """The URL of an API over a real pool with traffic, a minute old."""
    with region_folder() as folder:
        environment = os.environ | {"KVPOOL_RUNTIME_DIR": str(folder / "run")}
        (folder / "pool.yaml").write_text(MANIFEST.replace("MEDIA", str(folder)))
        command = [sys.executable, "-m", "kvpool", "up", "-f", str(folder / "pool.yaml"), "--api", "0"]
        up = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
        traffic = subprocess.Popen([sys.executable, "-c", TRAFFIC], env=environment)
        try:
            time.sleep(65)
            assert traffic.poll() is None
            yield up.stdout.rpartition("status API: ")[2].strip()
        finally:
            traffic.kill()
            traffic.wait()
            down = [sys.executable, "-m", "kvpool", "down", "prefix-pool", "--delete", "--force"]
            subprocess.run(down, env=environment, capture_output=True, timeout=60, check=True)


@contextmanager
def serving(source: StillSource, **service: Any) -> Iterator[str]:
    """The URL of an API over a source of the test, in a thread."""
    import uvicorn

    from kvpool.api.app import create_app

    listener = server.listening("127.0.0.1", 0)
    config = uvicorn.Config(
        create_app(Service(source, **service)), log_config=None, timeout_graceful_shutdown=1
    )
    running = uvicorn.Server(config)
    running.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield server.url_of(listener)
    finally:
        running.should_exit = True
        thread.join(20)
        listener.close()


@contextmanager
def opened(browser: Any, url: str, size: str = "desktop", scheme: str = "light") -> Iterator[Any]:
    """A page at `url`. It collects what is logged, and fails at its end when other places were asked."""
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    page.errors, page.elsewhere = [], []
    page.on("console", lambda m: page.errors.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on(
        "request", lambda r: page.elsewhere.append(r.url) if not r.url.startswith((url, "data:")) else None
    )
    page.goto(url + "/")
    yield page
    context.close()
    assert not page.elsewhere, "the page asks other places"


def is_state(page: Any, state: str, within_s: float = 20.0) -> None:
    page.locator(f"#live[data-state={state}]").wait_for(timeout=within_s * 1000)


def keep(page: Any, name: str) -> None:
    folder = os.environ.get("KVPOOL_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=f"{folder}/{name}.jpg", full_page=True, type="jpeg", quality=80)


def is_accessible(page: Any) -> None:
    found = Axe().run(page).response["violations"]
    assert not [(v["id"], [n["target"] for n in v["nodes"]]) for v in found]


def fits(page: Any) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_live_pool_is_shown_without_errors(browser: Any, live: str, size: str, scheme: str) -> None:
    with opened(browser, live, size, scheme) as page:
        is_state(page, "live")
        page.locator("#main[aria-busy=false]").wait_for()
        assert page.locator("#pool").input_value() == "local/prefix-pool"
        assert page.locator("#rate").inner_text().endswith(" %")
        assert "looked-up blocks were served" in page.locator("#headline").inner_text()
        assert page.locator("#chart canvas").is_visible()
        assert page.locator("#tiers meter").count() == 2
        assert page.locator("#models tr").count() == 2
        assert page.locator("#nodes .state").inner_text() == "ready"
        assert page.locator("#engines .state").inner_text() == "running"
        assert " %" in page.locator("#engines").inner_text()
        assert " %" in page.locator("#models").inner_text()
        assert re.match(r"[\d.]+ (s|min)$", page.locator("#prefill").inner_text())
        mean, low, high = map(float, re.findall(r"([\d.]+) %", page.locator("#chart-text").inner_text()))
        assert low <= mean <= high
        assert page.locator("#prefill-note").inner_text().startswith("measured for ")
        before = page.locator("#rate-note").inner_text()
        time.sleep(5)
        assert page.locator("#rate-note").inner_text() != before, "the numbers are not live"
        fits(page)
        is_accessible(page)
        keep(page, f"dashboard-{size}-{scheme}")
        assert not page.errors


def test_keyboard_reaches_and_changes_everything(browser: Any, live: str) -> None:
    with opened(browser, live) as page:
        is_state(page, "live")
        names = []
        for _ in range(9):
            page.keyboard.press("Tab")
            names.append(page.evaluate(FOCUSED))
        assert names[:3] == ["skip", "pool", "1h"]
        assert "SUMMARY" in names
        page.locator("input[value='1h']").focus()
        page.keyboard.press("ArrowLeft")
        assert page.locator("input[value='15m']").is_checked()
        page.locator("summary").focus()
        page.keyboard.press("Enter")
        assert page.locator("#history tr").first.is_visible()
        assert not page.errors


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_theme_that_was_chosen_wins_over_the_system_and_stays(browser: Any, scheme: str) -> None:
    other = {"light": "dark", "dark": "light"}[scheme]
    shown = "document.documentElement.dataset.theme + ' ' + getComputedStyle(document.body).backgroundColor"
    with serving(StillSource()) as url, opened(browser, url, "desktop", scheme) as page:
        before = page.evaluate(shown)
        assert before.startswith(scheme)
        page.get_by_label("Theme").select_option(other)
        chosen = page.evaluate(shown)
        assert chosen.startswith(other)
        assert chosen.split(" ", 1)[1] != before.split(" ", 1)[1]
        page.reload()
        assert page.evaluate(shown) == chosen
        page.get_by_label("Theme").select_option("system")
        assert page.evaluate(shown) == before
        assert not page.errors


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_pool_says_how_to_start_one(browser: Any, scheme: str) -> None:
    with serving(StillSource()) as url, opened(browser, url, "desktop", scheme) as page:
        page.locator("#none").wait_for()
        assert "kvpool up" in page.locator("#none").inner_text()
        is_accessible(page)
        keep(page, f"dashboard-empty-{scheme}")
        assert not page.errors


def test_pool_that_nobody_used_has_no_rate_and_no_zero(browser: Any) -> None:
    fresh = replace(pool(lookups=0, hits=0), observed_at=time.time())
    with serving(StillSource(fresh)) as url, opened(browser, url) as page:
        is_state(page, "live")
        page.locator("#main[aria-busy=false]").wait_for()
        assert page.locator("#rate").inner_text() == "\N{EN DASH}"
        assert "first point comes within" in page.locator("#chart-empty").inner_text()
        assert page.locator("#misses-empty").is_visible()
        assert not page.errors


def test_old_news_is_called_stale_and_kept(browser: Any) -> None:
    old = replace(pool(), observed_at=time.time() - 300)
    with serving(StillSource(old)) as url, opened(browser, url) as page:
        is_state(page, "stale")
        assert "5 min ago" in page.locator("#live").inner_text()
        assert "last that was known" in page.locator("#banner").inner_text()
        assert page.locator("#rate").inner_text() == "80.0 %"
        is_accessible(page)
        keep(page, "dashboard-stale")


def test_damage_and_hostile_names_are_shown_as_text(browser: Any) -> None:
    bad = "<img src=x onerror=alert(1)>"
    event = model.Event(
        reason="DamageFound", tier="dram", node="worker-0", message=bad, at="2026-01-31T08:00:00Z"
    )
    shown = pool().pool.model_copy(update={"problems": [bad]})
    source = StillSource(replace(pool(pool=shown), observed_at=time.time()))
    with serving(source) as url, opened(browser, url) as page:
        is_state(page, "live")
        now = replace(pool(pool=shown, events=[event]), observed_at=time.time())
        source.board.put(now)
        page.locator("#events li").wait_for()
        assert bad in page.locator("#events").inner_text()
        assert bad in page.locator("#problems").inner_text()
        assert page.locator("main img").count() == 0
        assert not page.errors


def test_hosts_of_one_machine_are_told_apart(browser: Any) -> None:
    nodes = [model.Node(name=f"p-{i}", node_name="vm", host=i, ready=True) for i in range(2)]
    nodes.append(model.Node(name="p-2", node_name="other", host=2, ready=True))
    source = StillSource(replace(pool(nodes=3), nodes=nodes, observed_at=time.time()))
    with serving(source) as url, opened(browser, url) as page:
        is_state(page, "live")
        page.locator("#nodes th").first.wait_for()
        assert page.locator("#nodes th").all_inner_texts() == ["vm (host 0)", "vm (host 1)", "other"]
        assert page.locator("#events-empty").inner_text() == "No events."


@pytest.mark.parametrize(
    ("kind", "words"), [("local", "KVPOOL_API_TOKEN"), ("cluster", "kubectl create token")]
)
def test_token_form_says_which_token(browser: Any, kind: Literal["local", "cluster"], words: str) -> None:
    source = StillSource()
    source.kind = kind
    with serving(source, access=TokenAccess(TOKEN)) as url, opened(browser, url) as page:
        page.locator("#access").wait_for()
        text = page.locator("#access").inner_text()
        assert words in text
        assert ("kubectl" in text) == (kind == "cluster")
        is_accessible(page)


def test_token_is_asked_for_and_used(browser: Any) -> None:
    source = StillSource(replace(pool(), observed_at=time.time()))
    with serving(source, access=TokenAccess(TOKEN)) as url, opened(browser, url) as page:
        page.locator("#access").wait_for()
        is_accessible(page)
        page.locator("#token").fill("wrong")
        page.keyboard.press("Enter")
        page.locator("#banner", has_text="not known").wait_for()
        page.locator("#token").fill(TOKEN)
        page.keyboard.press("Enter")
        is_state(page, "live")
        assert page.locator("#rate").inner_text() == "80.0 %"
        assert TOKEN not in page.url
        assert all("401" in error for error in page.errors)


def test_api_that_goes_away_is_said_and_comes_back(browser: Any, live: str) -> None:
    with opened(browser, live) as page:
        is_state(page, "live")
        rate = page.locator("#rate").inner_text()
        page.context.set_offline(True)
        is_state(page, "away", 45)
        assert "last that was known" in page.locator("#banner").inner_text()
        assert page.locator("#rate").inner_text()[:1] == rate[:1]
        keep(page, "dashboard-away")
        page.context.set_offline(False)
        is_state(page, "live", 45)


def test_source_behind_is_on_the_api_and_not_in_the_way(browser: Any) -> None:
    source = StillSource(replace(pool(), observed_at=time.time()))
    source.ready = Readiness(False, "the watch is dead")
    with serving(source) as url, opened(browser, url) as page:
        is_state(page, "live")
        assert page.locator("#rate").inner_text() == "80.0 %"
