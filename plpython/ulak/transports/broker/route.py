"""Where a message goes within a broker: a topic, a stream, a routing key. Parts of it may come from its metadata."""

from __future__ import annotations

import re
from collections.abc import Callable

from ulak.messages import event
from ulak.messages.delivery import ConfigError, Message, MessageError

_PLACE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_.-]*)\}")
_SEPARATORS = "/.:"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class Route:
    """For example `orders.{event_type}`: a name in braces is a field of the message's metadata."""

    __slots__ = ("_key", "_names", "_problem", "_separators", "_texts")

    def __init__(
        self, key: str, template: str, problem: Callable[[str], str | None], allow_separators: bool = False
    ) -> None:
        """`key` is the config's key, for errors; `problem` says what is wrong with a complete route, or None."""
        pieces = _PLACE.split(template)
        self._texts, self._names = pieces[0::2], pieces[1::2]
        self._key = key
        self._problem = problem
        # A value that contains one of the template's separators would lead to another part of the broker.
        self._separators = [] if allow_separators else [each for each in _SEPARATORS if each in "".join(self._texts)]
        if any("{" in text or "}" in text for text in self._texts):
            raise ConfigError(f"{key}: a brace must enclose the name of a field of the metadata, as in {{event_type}}")
        if not self._names and (wrong := problem(template)):
            raise ConfigError(f"{key} {wrong}")

    def of(self, message: Message) -> str:
        """Raises MessageError."""
        if not self._names:
            return self._texts[0]
        metadata = event.metadata_of(message)
        filled = [self._texts[0]]
        for name, text in zip(self._names, self._texts[1:], strict=True):
            filled += (self._value(name, metadata.get(name)), text)
        route = "".join(filled)
        if wrong := self._problem(route):
            raise MessageError(f"{self._key} {wrong}, with the values of the message's metadata")
        return route

    def _value(self, name: str, value: object) -> str:
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            told = "has no" if value is None or value == "" else "has no text or number as"
            raise MessageError(f"the message's metadata {told} {name}, which {self._key} asks for")
        text = str(value)
        if _CONTROL.search(text):
            raise MessageError(f"the message's metadata has a control character in {name}, which {self._key} asks for")
        for each in self._separators:
            # Event types are names with dots.
            if each in text and (each != "." or name != "event_type"):
                raise MessageError(f'the message\'s metadata has "{each}" in {name}, which parts {self._key}')
        return text
