"""The page of ulak.report() as a part of ours: with links where it names endpoints, messages and dead letters."""

from __future__ import annotations

import base64
import hashlib
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from typing import NamedTuple

from ulak_console import actions

Link = Callable[..., str]

_NO_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


class Report(NamedTuple):
    style: str
    main: str

    @property
    def style_hash(self) -> str:
        """The name of this style in a content security policy."""
        return "sha256-" + base64.b64encode(hashlib.sha256(self.style.encode()).digest()).decode()


def embedded(page: str, link: Link, may_act: bool) -> Report:
    """ulak writes it as XML, too, and it contains no script; what it quotes is text here as well."""
    # An earlier version may have stored texts that XML can't contain: that is no reason to show nothing.
    root = ElementTree.fromstring(_NO_XML.sub("\ufffd", page.split("\n", 1)[1]))
    style, main = root.find("./head/style"), root.find("./body/main")
    assert style is not None
    assert main is not None
    for element in list(main.iter()):
        if name := element.get("data-endpoint"):
            _wrap(element, link("endpoint", name=name))
        if message := element.get("data-message"):
            _wrap(element, link("message", id=message))
        if may_act and (letter := element.get("data-letter")):
            _wrap(element, link("act", action="redrive_message", id=letter))
        if may_act and (receiver := element.get("data-receiver")):
            pattern = element.get("data-pattern")
            _append(element, "Redrive these", link("act", action="redrive", endpoint=receiver, error_like=pattern))
        if may_act and element.tag == "details" and (code := element.find("./pre/code")) is not None:
            for action, given in actions.of_sql(code.text or ""):
                _append(element, action.title, link("act", action=action.name, **given))
    for panel in list(main.iter("section")):
        if panel.get("class") == "panel":
            _fold(panel)
    return Report(style.text or "", ElementTree.tostring(main, encoding="unicode", short_empty_elements=False))


def _fold(panel: ElementTree.Element) -> None:
    """So that it can be closed, on a phone for example."""
    title, *rest = list(panel)
    summary = ElementTree.Element("summary")
    summary.append(title)
    details = ElementTree.Element("details", {"class": "foldable", "open": "open"})
    details.extend([summary, *rest])
    for child in list(panel):
        panel.remove(child)
    panel.append(details)


def _wrap(element: ElementTree.Element, address: str) -> None:
    anchor = ElementTree.Element("a", href=address)
    anchor.text, element.text = element.text, None
    element.insert(0, anchor)


def _append(element: ElementTree.Element, text: str, address: str) -> None:
    paragraph = ElementTree.SubElement(element, "p")
    ElementTree.SubElement(paragraph, "a", {"href": address, "class": "button"}).text = text
