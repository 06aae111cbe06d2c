"""The bell, with real signals. Each test is a process of its own, in which Python handles the signal, as PostgreSQL does."""

from __future__ import annotations

import subprocess
import sys

PRELUDE = """
import os, select, signal, time
from ulak.worker.wake_up import Bell

handled = []
signal.signal(signal.SIGUSR1, lambda number, frame: handled.append(number))
bell = Bell()


def ring():
    os.kill(os.getpid(), signal.SIGUSR1)


def ring_soon():
    if os.fork() == 0:
        time.sleep(0.1)
        os.kill(os.getppid(), signal.SIGUSR1)
        os._exit(0)
"""


def run(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", PRELUDE + script], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_ring_is_kept_until_it_is_asked_for_and_then_handled() -> None:
    run("""
bell.hold()
ring()
assert handled == []
assert bell.rang()
assert handled == [signal.SIGUSR1]
assert not bell.rang()
""")


def test_it_keeps_the_next_ring_too() -> None:
    run("""
bell.hold()
for n in (1, 2, 3):
    ring()
    assert len(handled) == n - 1
    assert bell.rang()
    assert len(handled) == n
""")


def test_a_ring_ends_the_wait() -> None:
    run("""
bell.hold()
ring_soon()
began = time.monotonic()
assert bell.rang(10)
assert 0.05 < time.monotonic() - began < 5
assert len(handled) == 1
""")


def test_a_ring_ends_somebody_elses_wait() -> None:
    run("""
bell.hold()
epoll = select.epoll()
epoll.register(bell.fileno(), select.EPOLLIN)
ring_soon()
assert epoll.poll(10) == [(bell.fileno(), select.EPOLLIN)]
assert handled == []
assert bell.rang()
""")


def test_without_a_ring_the_wait_ends_in_time() -> None:
    run("""
bell.hold()
began = time.monotonic()
assert not bell.rang(0.05)
assert 0.04 < time.monotonic() - began < 5
""")


def test_who_lets_go_handles_what_was_kept_and_what_follows() -> None:
    run("""
bell.hold()
ring()
bell.let_go()
assert len(handled) == 1
ring()
assert len(handled) == 2
""")


def test_what_rang_before_it_was_held_is_not_told() -> None:
    run("""
ring()
assert len(handled) == 1
bell.hold()
assert not bell.rang()
""")


def test_who_closes_it_lets_go() -> None:
    run("""
bell.hold()
bell.close()
ring()
assert len(handled) == 1
""")
