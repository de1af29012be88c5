"""The curve of an engine's steps, and what hits have saved: right where it can be known, silent where not."""

from __future__ import annotations

import random

import pytest

from kvpool_connector.plan import Work
from kvpool_connector.prefill import SAMPLES_MIN, TOKENS_MIN, Curve, HostStopwatch, Savings

OVERHEAD, TOKEN, PAIR = 4e-3, 20e-6, 5e-9  # of an engine, in s


def work(context: int, tokens: int) -> Work:
    made = Work()
    made.add(context, tokens)
    return made


def seconds(of: Work, overhead: float = OVERHEAD) -> float:
    return overhead + TOKEN * of.tokens + PAIR * of.pairs


def prompts(rng: random.Random, count: int) -> list[Work]:
    """Prompts of different lengths, in chunks of 2048 tokens."""
    found: list[Work] = []
    while len(found) < count:
        length = int(rng.uniform(50, 12000))
        found += [work(at, min(2048, length - at)) for at in range(0, length, 2048)]
    return found[:count]


def fed(steps: list[Work], noise: float = 0.0, rng: random.Random | None = None) -> Curve:
    curve, rng = Curve(), rng or random.Random(1)
    for step in steps:
        curve.add(step, seconds(step) * rng.lognormvariate(0, noise))
    return curve


def test_work_adds_up_whatever_the_chunks() -> None:
    whole, chunked = work(100, 3000), Work()
    for at in range(0, 3000, 512):
        chunked.add(100 + at, min(512, 3000 - at))
    assert (chunked.tokens, chunked.pairs) == (whole.tokens, whole.pairs) == (3000, 3000 * 1600)


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("seed", range(5))
def test_curve_of_real_steps_tells_what_a_hit_saves(noise: float, seed: int) -> None:
    rng = random.Random(seed)
    curve = fed(prompts(rng, 100), noise, rng)
    for hit in (work(0, 500), work(0, 4000), work(4000, 4000), work(0, 30000)):
        told = curve.seconds(hit)
        assert told == pytest.approx(seconds(hit, 0), rel=0.01 + 2 * noise)


def test_cost_of_the_step_itself_is_not_saved() -> None:
    curve = fed([work(0, n) for n in range(20, 400, 10)])
    assert curve.seconds(work(0, 100)) == pytest.approx(100 * TOKEN, rel=0.05)


def test_too_few_steps_tell_nothing() -> None:
    steps = prompts(random.Random(1), SAMPLES_MIN)
    assert fed(steps[:-1]).seconds(work(0, 500)) is None
    assert fed(steps).seconds(work(0, 500)) is not None


def test_steps_that_are_all_alike_tell_nothing() -> None:
    """Whether their time was the step's, the tokens' or the pairs' cannot be known."""
    rng = random.Random(1)
    curve = fed([work(0, 256)] * 50, 0.1, rng)
    assert curve.seconds(work(0, 30000)) is None
    assert not curve.report().trusted


def test_steps_that_scatter_tell_nothing() -> None:
    rng = random.Random(1)
    curve = Curve()
    for step in prompts(rng, 200):
        curve.add(step, rng.uniform(1e-4, 1.0))
    assert curve.seconds(work(0, 500)) is None


def test_curve_is_never_negative() -> None:
    curve = Curve()
    for tokens in range(100, 2000, 100):  # the longer, the faster: a throttle that was lifted
        curve.add(work(0, tokens), 1.0 / tokens)
    said = curve.report()
    assert (said.a_us >= 0, said.b_ns >= 0) == (True, True)
    assert curve.seconds(work(0, 500)) is None


def test_engine_that_became_slower_is_believed_soon() -> None:
    rng = random.Random(1)
    curve = fed(prompts(rng, 300))
    for step in prompts(rng, 300):
        curve.add(step, 3 * seconds(step))
    assert curve.seconds(work(0, 2000)) == pytest.approx(3 * seconds(work(0, 2000), 0), rel=0.15)


def test_one_slow_step_changes_little() -> None:
    rng = random.Random(1)
    curve = fed(prompts(rng, 60))
    before = curve.seconds(work(0, 2000))
    curve.add(work(0, 1000), 10.0)
    assert curve.seconds(work(0, 2000)) == pytest.approx(before, rel=0.2)


@pytest.mark.parametrize("step", [work(5000, TOKENS_MIN - 1), Work()])
def test_decoding_says_nothing_about_prompts(step: Work) -> None:
    curve = Curve()
    curve.add(step, 0.01)
    assert curve.samples == 0
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        curve.add(work(0, 100), wrong)
    assert curve.samples == 0


def test_report_is_in_units_for_people() -> None:
    said = fed(prompts(random.Random(1), 100)).report()
    assert (said.a_us, said.b_ns) == (pytest.approx(20, rel=0.01), pytest.approx(5, rel=0.01))
    assert (said.samples, said.trusted) == (100, True)


def test_savings_wait_as_sums() -> None:
    saved = Savings()
    saved.add(0, 1000, 10)
    saved.add(1000, 1000, 10)
    assert (saved.tokens, saved.pairs, saved.blocks) == (2000, 2000 * 1000, 20)


def test_stopwatch_times_what_lies_between() -> None:
    watch = HostStopwatch()
    watch.stop(work(0, 100))  # without a start
    watch.start()
    watch.stop(Work(1, 500.0))  # a step of decoding
    watch.start()
    watch.stop(work(0, 100))
    ((told, took),) = watch.take()
    assert told == work(0, 100)
    assert 0 <= took < 1
    assert watch.take() == []


@pytest.mark.parametrize("loads_first", [True, False])
def test_stopwatch_leaves_loads_out_wherever_they_are(
    monkeypatch: pytest.MonkeyPatch, loads_first: bool
) -> None:
    now = [100.0]
    monkeypatch.setattr("kvpool_connector.prefill.time.perf_counter", lambda: now[0])
    watch = HostStopwatch()
    watch.resume()  # nothing runs
    watch.start()
    now[0] += 0 if loads_first else 2
    watch.pause()
    now[0] += 50
    watch.resume()
    now[0] += 3 if loads_first else 1
    watch.stop(work(0, 100))
    assert watch.take() == [(work(0, 100), 3.0)]
