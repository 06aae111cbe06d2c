"""Bodies made of a template: texts with {payload.order.id} in them, and {"$path": "$.items[*].sku"}, which takes a
value as it is.

No code, and bounded: by the number of values that paths visit, and by the size of the body.
Paths are a part of PostgreSQL's jsonpath (lax): members, "quoted" ones, [0], [*] and .*; tests compare both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote_plus

from ulak.messages.delivery import ConfigError, Message, MessageError

MOST_BYTES = 10_000_000
MOST_VISITS = 1_000_000
_ROOTS = ("payload", "metadata")
_FACTS = ("id", "message_id", "correlation_id", "ordering_key", "created_at")
_IN_TEXT = re.compile(r"\{\{|\}\}|\{([^{}|]+)(?:\|([^{}]*))?\}|[{}]")
_STEP = re.compile(r'\.([A-Za-z_][A-Za-z0-9_]*)|\."([^"\\]*)"|\[(\d{1,9})\]|(\[\*\])|(\.\*)')


class _Number(str):
    """A number as the payload writes it: a float might change it."""

    __slots__ = ()


class Path(NamedTuple):
    """A $path; default is None or a list of one value."""

    text: str
    steps: Sequence[Callable[[Any], Iterator[Any]]]
    is_many: bool
    default: Sequence[Any] | None


class Place(NamedTuple):
    """{payload.order.id} in a text."""

    text: str
    names: Sequence[str]
    default: str | None


class Text(NamedTuple):
    parts: Sequence[str | Place]


class Template(NamedTuple):
    """A text is sent as it is, with values percent-encoded if it is a form. Anything else is JSON, whose constant parts
    are written when the config is parsed."""

    parts: Sequence[str | Text | Path]
    is_text: bool
    is_form: bool

    def fill(self, message: Message) -> str:
        """The body. Raises MessageError."""
        filling = _Filling(message)
        out: list[str] = []
        for part in self.parts:
            if isinstance(part, str):
                out.append(filling.counted(part))
            elif isinstance(part, Path):
                out.append(filling.counted(_json(filling.value(part))))
            elif self.is_text:
                out.append(filling.text(part, quote_plus if self.is_form else str))
            else:
                out.append(json.dumps(filling.text(part, str), ensure_ascii=False))
        return "".join(out)


def parse(template: Any, content_type: str) -> Template:
    """Raises ConfigError."""
    is_form = content_type.partition(";")[0].strip().lower() == "application/x-www-form-urlencoded"
    return Template(tuple(_parse(template)), isinstance(template, str), is_form)


def _parse(value: Any) -> Iterator[str | Text | Path]:
    if isinstance(value, str):
        yield Text(tuple(_parts(value)))
    elif isinstance(value, list):
        yield from _all("[]", (("", each) for each in value))
    elif isinstance(value, dict) and "$path" in value:
        steps, is_many = path(value["$path"])
        default = [value["missing"]] if "missing" in value else None
        yield Path(value["$path"], steps, is_many, default)
    elif isinstance(value, dict):
        yield from _all("{}", ((json.dumps(key, ensure_ascii=False) + ": ", each) for key, each in value.items()))
    else:
        yield json.dumps(value)


def _all(marks: str, items: Iterable[tuple[str, Any]]) -> Iterator[str | Text | Path]:
    yield marks[0]
    for number, (start, value) in enumerate(items):
        yield (", " if number else "") + start
        yield from _parse(value)
    yield marks[1]


def _parts(text: str) -> Iterator[str | Place]:
    end = 0
    for found in _IN_TEXT.finditer(text):
        yield text[end : found.start()]
        end = found.end()
        if found[0] in ("{{", "}}"):
            yield found[0][0]
            continue
        names = (found[1] or "").split(".")
        if names[0] not in _ROOTS and (names[0] not in _FACTS or len(names) > 1):
            raise ConfigError(f"body: {found[0]} isn't a place such as {{payload.order.id}}")
        yield Place(found[0], names, found[2])
    yield text[end:]


def path(text: Any) -> tuple[Sequence[Callable[[Any], Iterator[Any]]], bool]:
    """The steps of a path, and whether it may find several values. Raises ConfigError."""
    if not isinstance(text, str) or not text.startswith("$"):
        raise ConfigError("body: $path must begin with $")
    steps: list[Callable[[Any], Iterator[Any]]] = []
    is_many, end = False, 1
    while end < len(text):
        step = _STEP.match(text, end)
        if step is None:
            raise ConfigError(f"body: $path {text} has more than members, [0], [*] and .*")
        member, quoted, index, elements, members = step.groups()
        is_many = is_many or bool(elements or members)
        if index is not None:
            steps.append(_element(int(index)))
        elif elements:
            steps.append(_elements)
        elif members:
            steps.append(_members)
        else:
            steps.append(_member(quoted if member is None else member))
        end = step.end()
    return steps, is_many


def found(steps: Iterable[Callable[[Any], Iterator[Any]]], value: Any, visit: Callable[[int], object]) -> list[Any]:
    """visit() is told how many values each step has found."""
    values = [value]
    for step in steps:
        values = [each for one in values for each in step(one)]
        visit(len(values))
    return values


# As in lax mode: the member of an array is that of its elements, and a value that isn't an array counts as an array of
# one element.


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    return (each for each in (value if isinstance(value, list) else [value]) if isinstance(each, dict))


def _member(name: str) -> Callable[[Any], Iterator[Any]]:
    return lambda value: (each[name] for each in _objects(value) if name in each)


def _members(value: Any) -> Iterator[Any]:
    return (member for each in _objects(value) for member in each.values())


def _elements(value: Any) -> Iterator[Any]:
    yield from value if isinstance(value, list) else [value]


def _element(index: int) -> Callable[[Any], Iterator[Any]]:
    return lambda value: iter((value if isinstance(value, list) else [value])[index : index + 1])


class _Filling:
    """Fills a template for one message. A ping has no values, so places stay as they are."""

    def __init__(self, message: Message) -> None:
        self._bytes = 0
        self._visits = 0
        self._is_ping = message.id == 0
        self._facts: Mapping[str, Any] = {name: getattr(message, name) for name in _FACTS}
        self._roots = {"payload": message.payload, "metadata": message.metadata}
        self._parsed: dict[str, Any] = {}

    def text(self, text: Text, encode: Callable[[str], str]) -> str:
        return "".join([part if isinstance(part, str) else encode(self._in_text(part)) for part in text.parts])

    def counted(self, text: str) -> str:
        self._bytes += len(text)
        if self._bytes > MOST_BYTES:
            raise MessageError(f"its body would have more than {MOST_BYTES} bytes")
        return text

    def _visit(self, count: int) -> None:
        self._visits += count
        if self._visits > MOST_VISITS:
            raise MessageError(f"the paths of its body visit more than {MOST_VISITS} values")

    def value(self, node: Path) -> Any:
        values = found(node.steps, self._root("payload"), self._visit)
        if node.is_many:
            return values
        if len(values) == 1:
            return values[0]
        if node.default is not None and not values:
            return node.default[0]
        if self._is_ping:
            return node.text
        problem = "finds several values: write [*] for an array of them" if values else "finds nothing in the payload"
        raise MessageError(f"the body's $path {node.text} {problem}")

    def _in_text(self, place: Place) -> str:
        root, *names = place.names
        value = self._facts[root] if root in self._facts else self._root(root)
        for name in names:
            if isinstance(value, dict):
                value = value.get(name)
            elif isinstance(value, list) and name.isascii() and name.isdigit() and len(name) < 10:
                value = next(iter(value[int(name) : int(name) + 1]), None)
            else:
                value = None
        if value is None:
            if place.default is not None:
                return place.default
            if self._is_ping:
                return place.text
            raise MessageError(f"the message has nothing for {place.text} in the body")
        return self.counted(value if isinstance(value, str) else str(value) if type(value) is int else _json(value))

    def _root(self, name: str) -> Any:
        if name not in self._parsed:
            text = self._roots[name]
            try:
                self._parsed[name] = None if text is None else json.loads(text, parse_float=_Number, parse_int=_Number)
            except RecursionError as error:
                raise MessageError(f"the {name} is nested too deeply for a template") from error
        return self._parsed[name]


def _json(value: Any) -> str:
    if isinstance(value, _Number):
        return value
    if isinstance(value, dict):
        pairs = (json.dumps(key, ensure_ascii=False) + ": " + _json(each) for key, each in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_json, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
