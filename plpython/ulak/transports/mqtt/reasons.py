"""What a broker's reason codes mean, in words and for the message."""

from __future__ import annotations

from paho.mqtt import reasoncodes
from paho.mqtt.packettypes import PacketTypes

from ulak.messages.delivery import PERMANENT, RETRYABLE

# Codes from here on are refusals; lower ones are successes, for example that the topic has no subscribers.
FIRST_REFUSAL = 0x80
UNSUPPORTED_VERSION = 0x84

# Version 2 of the library renamed the class.
_Reason = getattr(reasoncodes, "ReasonCode", None) or reasoncodes.ReasonCodes
# A code has one name, or several for different packets.
_NAMES = _Reason(PacketTypes.DISCONNECT).names.items()
_WORDS: dict[int, str] = {code: next(iter(names)).lower() for code, names in _NAMES}
# Return codes of MQTT 3.1.1, mapped to the MQTT 5 codes of the same meaning.
_SAME_AS = {1: 0x84, 2: 0x85, 3: 0x88, 4: 0x86, 5: 0x87}
# Wrong credentials or missing rights: bad user name or password, not authorized, banned, bad authentication method.
_LOGIN = frozenset((0x86, 0x87, 0x8A, 0x8C))
# The message itself is refused; a retry doesn't help.
_PERMANENT = frozenset((0x90, 0x95, 0x99))


def words(code: int) -> str:
    code = _SAME_AS.get(code, code)
    return f"{_WORDS.get(code, 'refused')} (0x{code:02X})"


def told(peer: str, code: int) -> str:
    """The text of the error."""
    kind = "login" if _SAME_AS.get(code, code) in _LOGIN else "mqtt"
    return f"{kind}: {peer}: {words(code)}"


def prefix(code: int) -> str:
    return PERMANENT if code in _PERMANENT else RETRYABLE
