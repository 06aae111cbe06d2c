"""The wake-up, with real signals. Each test is a process of its own, in which Python handles the signal, as PostgreSQL does."""

from __future__ import annotations

import subprocess
import sys

PRELUDE = """
import os, select, signal
from ulak.sessions.wake_up import SignalWakeUp

handled = []
signal.signal(signal.SIGUSR1, lambda number, frame: handled.append(number))
wake_up = SignalWakeUp()


def is_readable(seconds=0):
    return bool(select.select([wake_up], [], [], seconds)[0])


def notify():
    os.kill(os.getpid(), signal.SIGUSR1)


def notify_when_it_waits():
    parent = os.getpid()
    if os.fork() == 0:
        while open(f"/proc/{parent}/stat").read().rpartition(")")[2].split()[0] != "S":
            pass
        os.kill(parent, signal.SIGUSR1)
        os._exit(0)
"""


def run(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", PRELUDE + script], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_wake_up_is_kept_until_it_is_asked_for_and_then_handled() -> None:
    run("""
wake_up.hold_back()
notify()
assert handled == []
assert is_readable()
assert wake_up.take()
assert handled == [signal.SIGUSR1]
assert not is_readable()
""")


def test_it_keeps_the_next_one_too() -> None:
    run("""
wake_up.hold_back()
for n in (1, 2, 3):
    notify()
    assert len(handled) == n - 1
    assert is_readable()
    assert wake_up.take()
    assert len(handled) == n
""")


def test_a_wake_up_ends_a_wait_of_epoll() -> None:
    run("""
wake_up.hold_back()
epoll = select.epoll()
epoll.register(wake_up.fileno(), select.EPOLLIN)
notify_when_it_waits()
assert epoll.poll(10) == [(wake_up.fileno(), select.EPOLLIN)]
assert handled == []
assert wake_up.take()
assert len(handled) == 1
""")


def test_after_letting_go_pending_and_new_signals_are_handled() -> None:
    run("""
wake_up.hold_back()
notify()
wake_up.let_go()
assert len(handled) == 1
notify()
assert len(handled) == 2
""")


def test_signals_from_before_the_hold_do_not_end_a_wait() -> None:
    run("""
notify()
assert len(handled) == 1
wake_up.hold_back()
assert not is_readable()
""")


def test_closing_it_lets_go() -> None:
    run("""
wake_up.hold_back()
wake_up.close()
notify()
assert len(handled) == 1
""")
