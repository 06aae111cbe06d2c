"""The soak's judgement: what grows is named, what is flat or small is not."""

from __future__ import annotations

from dataclasses import replace

from chaos.soak import Sample, growth

FLAT = Sample(minute=0, sent=0, live=5, worker_kb=30_000, queue_kb=20_000, index_kb=20_000, send_p99_ms=3.0)


def test_a_flat_run_is_flat_after_its_warm_up() -> None:
    warming_up = [replace(FLAT, worker_kb=10_000), replace(FLAT, live=900), FLAT]

    assert growth([*warming_up, FLAT, FLAT, FLAT, FLAT, FLAT, FLAT]) == []


def test_noise_is_no_growth() -> None:
    assert growth([*[FLAT] * 6, *[replace(FLAT, live=500, send_p99_ms=15.0)] * 3]) == []


def test_a_leak_is_named() -> None:
    leaking = [replace(FLAT, worker_kb=30_000 + n * 10_000) for n in range(9)]

    assert growth(leaking) == ["worker_kb grew from 70000 to 100000"]
