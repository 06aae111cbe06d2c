"""The address guard's list, address by address."""

from __future__ import annotations

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ulak.safety.address import Guard

BLOCKED = {
    "this host": "0.0.0.0 0.1.2.3 ::",
    "loopback": "127.0.0.1 127.255.255.255 ::1",
    "private network": "10.0.0.1 10.255.255.255 172.16.0.1 172.31.255.255 192.168.0.1",
    "link-local": "169.254.0.1 fe80::1 febf::1 fe80::1%eth0",
    "cloud metadata": "169.254.169.254 169.254.170.2 168.63.129.16 100.100.100.200 fd00:ec2::254",
    "carrier-grade NAT": "100.64.0.1 100.127.255.255",
    "special purpose": "192.0.0.1 100::1 2001:1::1 5f00::1",
    "documentation": "192.0.2.1 198.51.100.1 203.0.113.1 2001:db8::1 3fff::1",
    "benchmarking": "198.18.0.1 198.19.255.255 2001:2::1",
    "multicast": "224.0.0.1 239.255.255.255 ff02::1",
    "reserved": "240.0.0.1 255.255.255.255 4000::1 1::1 fe00::1",
    "IPv4-mapped": "::ffff:127.0.0.1 ::ffff:8.8.8.8",
    "IPv4-compatible": "::127.0.0.1 ::8.8.8.8",
    "IPv4-translated": "::ffff:0:7f00:1",
    "NAT64": "64:ff9b::7f00:1 64:ff9b:1::1",
    "6to4": "2002:7f00:1:: 192.88.99.1",
    "Teredo": "2001:0:1::1",
    "unique local": "fc00::1 fd12:3456::1",
    "site-local": "fec0::1",
    "not an IP address": "localhost 0x7f000001",
}


@pytest.mark.parametrize(("rule", "address"), [(rule, each) for rule, all_ in BLOCKED.items() for each in all_.split()])
def test_an_internal_address_is_blocked_and_the_rule_is_named(rule: str, address: str) -> None:
    found = Guard().blocked_by(address)

    assert found is not None
    assert found.split(",")[0] == rule


PUBLIC = """
    1.1.1.1 8.8.8.8 9.255.255.255 11.0.0.0 100.63.255.255 100.128.0.0 172.15.255.255 172.32.0.0 192.167.255.255
    192.169.0.0 198.17.255.255 198.20.0.0 223.255.255.255 168.63.129.15 2606:4700::1111 2a00:1450::1
"""


@pytest.mark.parametrize("address", PUBLIC.split())
def test_a_public_address_passes(address: str) -> None:
    assert Guard().blocked_by(address) is None


def test_the_allow_list_opens_its_networks_only() -> None:
    guard = Guard(allowed=["10.1.0.0/16", " fd00::/8 ", ""])

    assert guard.blocked_by("10.1.2.3") is None
    assert guard.blocked_by("fd00::5") is None
    assert guard.blocked_by("10.2.0.1") is not None
    assert guard.blocked_by("::ffff:10.1.2.3") is not None


def test_allow_internal_opens_everything() -> None:
    assert Guard(allow_internal=True).blocked_by("127.0.0.1") is None


@given(st.ip_addresses())
def test_whatever_python_calls_private_is_blocked(address: object) -> None:
    parsed = ip_address(str(address))

    if not parsed.is_global or parsed.is_multicast or parsed.is_reserved or parsed.is_loopback:
        assert Guard().blocked_by(str(parsed)) is not None


@pytest.mark.parametrize(
    ("address", "networks"),
    [
        ("127.0.0.1", "127.0.0.0/8"),
        ("::1", "::1/128"),
        ("10.1.2.3", "10.1.2.0/24"),
        ("172.18.0.4", "172.18.0.0/24"),
        ("fd12::5", "fd12::/64"),
    ],
)
def test_the_network_of_a_receiver_of_ones_own_can_be_allowed(address: str, networks: str) -> None:
    guard = Guard(allowed=["192.168.7.0/24"])

    assert guard.remedy(address) == f"select ulak.configure('http_allowed_networks', '192.168.7.0/24,{networks}');"
    assert Guard(allowed=[networks]).blocked_by(address) is None


@pytest.mark.parametrize(
    "address", ["169.254.169.254", "fd00:ec2::254", "169.254.1.1", "0.0.0.0", "224.0.0.1", "8.8.8.8", "x"]
)
def test_other_addresses_come_without_advice_to_allow_them(address: str) -> None:
    assert Guard().remedy(address) is None
