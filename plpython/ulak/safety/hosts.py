"""Which hosts may be dialled, judged by name; safety/address.py judges addresses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Hosts(NamedTuple):
    """A list of names and addresses; *.example.com stands for every name that ends in .example.com."""

    names: frozenset[str]
    endings: tuple[str, ...]
    # Why a host that isn't in the list may not be dialled.
    reason: str

    def refusal(self, host: str) -> str | None:
        """The same rule as ulak_private.is_listed()."""
        name = host.lower().rstrip(".")
        if name in self.names or name.endswith(self.endings):
            return None
        return f"host {host} {self.reason}"


def listed(names: Iterable[str], reason: str) -> Hosts:
    given = frozenset(names)
    return Hosts(given, tuple(each[1:] for each in given if each.startswith("*.")), reason)


def bound(lists: Iterable[str]) -> tuple[Hosts, ...]:
    """The lists of hosts that secrets are bound to."""
    return tuple(listed(each.split(","), "may not learn of a secret that is bound to other hosts") for each in lists)


def allowed(setting: str) -> tuple[Hosts, ...]:
    """The list http_allowed_hosts; an empty setting allows every host."""
    return (listed(setting.split(","), "is not listed in http_allowed_hosts"),) if setting else ()
