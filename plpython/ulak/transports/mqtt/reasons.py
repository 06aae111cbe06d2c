"""What a broker's reason codes mean: in words, and for the message that they are about."""

from __future__ import annotations

from ulak.messages.delivery import PERMANENT, RETRYABLE

# From here on a code is a refusal. Below are successes, such as that nobody subscribes to the topic.
FIRST_REFUSAL = 0x80
UNSUPPORTED_VERSION = 0x84

_WORDS = {
    0x80: "unspecified error",
    0x81: "malformed packet",
    0x82: "protocol error",
    0x83: "implementation specific error",
    0x84: "unsupported protocol version",
    0x85: "client id is not valid",
    0x86: "bad user name or password",
    0x87: "not authorized",
    0x88: "server unavailable",
    0x89: "server busy",
    0x8A: "banned",
    0x8B: "server shutting down",
    0x8C: "bad authentication method",
    0x8D: "keep alive timeout",
    0x8E: "session taken over by another client of the same id",
    0x90: "topic name is not valid",
    0x91: "packet identifier in use",
    0x93: "receive maximum exceeded",
    0x95: "packet too large",
    0x96: "message rate too high",
    0x97: "quota exceeded",
    0x98: "administrative action",
    0x99: "payload format is not valid",
    0x9A: "retain is not supported",
    0x9B: "QoS is not supported",
    0x9C: "use another server",
    0x9D: "server moved",
    0x9F: "connection rate exceeded",
}
# Return codes of MQTT 3.1.1, mapped to the MQTT 5 codes of the same meaning.
_SAME_AS = {1: 0x84, 2: 0x85, 3: 0x88, 4: 0x86, 5: 0x87}
# About who we are, or what we may do: bad user name or password, not authorized, banned, bad authentication method.
_LOGIN = frozenset((0x86, 0x87, 0x8A, 0x8C))
# The message itself is refused, and will be the next time.
_PERMANENT = frozenset((0x90, 0x95, 0x99))


def words(code: int) -> str:
    code = _SAME_AS.get(code, code)
    return f"{_WORDS.get(code, 'refused')} (0x{code:02X})"


def told(peer: str, code: int) -> str:
    """As an error."""
    kind = "login" if _SAME_AS.get(code, code) in _LOGIN else "mqtt"
    return f"{kind}: {peer}: {words(code)}"


def prefix(code: int) -> str:
    return PERMANENT if code in _PERMANENT else RETRYABLE
