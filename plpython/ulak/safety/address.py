"""Which addresses may be dialled: an explicit list, since Python's is_global lets several of these through."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from ulak.safety import hosts
from ulak.safety.hosts import Hosts

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

# The first match counts, so single addresses come before the ranges around them.
_RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "cloud metadata",
        ("169.254.169.254/32", "169.254.170.2/32", "100.100.100.200/32", "168.63.129.16/32", "fd00:ec2::/32"),
    ),
    ("this host", ("0.0.0.0/8", "::/128")),
    ("loopback", ("127.0.0.0/8", "::1/128")),
    ("private network", ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")),
    ("carrier-grade NAT", ("100.64.0.0/10",)),
    ("link-local", ("169.254.0.0/16", "fe80::/10")),
    ("documentation", ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32", "3fff::/20")),
    ("benchmarking", ("198.18.0.0/15", "2001:2::/48")),
    ("6to4", ("192.88.99.0/24", "2002::/16")),
    ("special purpose", ("192.0.0.0/24", "100::/64", "5f00::/16")),
    ("multicast", ("224.0.0.0/4", "ff00::/8")),
    ("reserved", ("240.0.0.0/4",)),
    ("IPv4-mapped", ("::ffff:0:0/96",)),
    ("IPv4-compatible", ("::/96",)),
    ("IPv4-translated", ("::ffff:0:0:0/96",)),
    ("NAT64", ("64:ff9b::/96", "64:ff9b:1::/48")),
    ("Teredo", ("2001::/32",)),
    ("special purpose", ("2001::/23",)),
    ("unique local", ("fc00::/7",)),
    ("site-local", ("fec0::/10",)),
)
_BLOCKED: tuple[tuple[str, Network], ...] = tuple(
    (rule, ip_network(network)) for rule, networks in _RULES for network in networks
)
# Networks that may contain your own receivers, and the prefix length of the part to allow; None: the whole network. No
# other network is ever suggested.
_OWN: Mapping[str, int | None] = {
    "127.0.0.0/8": None,
    "::1/128": None,
    "10.0.0.0/8": 24,
    "172.16.0.0/12": 24,
    "192.168.0.0/16": 24,
    "fc00::/7": 64,
}
# Everything else isn't assigned as global unicast.
_GLOBAL_UNICAST_6 = IPv6Network("2000::/3")


def networks(values: Iterable[str]) -> tuple[Network, ...]:
    """Parses the allow list; host bits are ignored. An unreadable value allows nothing: configure() refuses it, but one
    that was stored in another way must not end every run."""
    found: list[Network] = []
    for value in values:
        with contextlib.suppress(ValueError):
            found.append(ip_network(value.strip(), strict=False))
    return tuple(found)


def _rule(address: Address) -> tuple[str, Network] | None:
    return next(((rule, network) for rule, network in _BLOCKED if address in network), None)


class Guard:
    """Decides what may be dialled: first the host by its name, then the address that the name resolved to."""

    def __init__(
        self, allow_internal: bool = False, allowed: Iterable[str] = (), hosts: tuple[Hosts, ...] = ()
    ) -> None:
        """`hosts`: a host must be in each of these lists."""
        self._allow_internal = allow_internal
        self._allowed = networks(allowed)
        self._hosts = hosts

    def within(self, bound: Sequence[str]) -> Guard:
        """The guard for a config whose secrets are bound to these lists of hosts."""
        if not bound:
            return self
        narrower = copy(self)
        narrower._hosts = (*self._hosts, *hosts.bound(bound))
        return narrower

    def host_refusal(self, host: str) -> str | None:
        """Why this host may not be dialled, whatever its address is; None if it may."""
        for each in self._hosts:
            if refusal := each.refusal(host):
                return refusal
        return None

    def blocked_by(self, text: str) -> str | None:
        """The name of the rule that forbids this address, or None."""
        if self._allow_internal:
            return None
        try:
            address = ip_address(text)
        except ValueError:
            return "not an IP address"
        if isinstance(address, IPv6Address) and address.scope_id is not None:
            address = IPv6Address(int(address))
        if any(address in network for network in self._allowed):
            return None
        if rule := _rule(address):
            return f"{rule[0]}, {rule[1]}"
        if isinstance(address, IPv6Address) and address not in _GLOBAL_UNICAST_6:
            return "reserved, outside 2000::/3"
        return None

    def refusal(self, text: str) -> str | None:
        """Why this address may not be dialled, and how to allow it, in words for `last_error`; None if it may."""
        rule = self.blocked_by(text)
        if rule is None:
            return None
        remedy = self.remedy(text)
        return f"address {text} is blocked ({rule})" + (f"; to allow it: {remedy}" if remedy else "")

    def remedy(self, text: str) -> str | None:
        """The statement that also allows this address's network; None if nobody should run it."""
        try:
            address = ip_address(text)
        except ValueError:
            return None
        _, blocked = _rule(address) or (None, None)
        if str(blocked) not in _OWN:
            return None
        width = _OWN[str(blocked)]
        network = blocked if width is None else ip_network(f"{address}/{width}", strict=False)
        names = ",".join(map(str, (*self._allowed, network)))
        return f"select ulak.configure('http_allowed_networks', '{names}');"


def guard(settings: Mapping[str, str]) -> Guard:
    """By the settings of ulak.settings, whatever the protocol."""
    return Guard(
        allow_internal=settings["http_allow_internal_urls"] == "true",
        allowed=settings["http_allowed_networks"].split(","),
        hosts=hosts.allowed(settings["http_allowed_hosts"]),
    )
