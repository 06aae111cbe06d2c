"""Templates in a config: which are accepted, and what curl() shows of them."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.queue import DB, Queue
from ulak.transports.http import template

URL = {"url": "https://example.com"}
names = st.sampled_from(["a", "b", "sku"])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=12,
)
steps = st.sampled_from([".a", ".b", ".sku", '."a"', "[0]", "[1]", "[*]", ".*"])
paths = st.lists(steps, max_size=4).map(lambda steps: "$" + "".join(steps))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=values, path=paths)
def test_paths_find_what_jsonpath_finds(alone: DB, value: Any, path: str) -> None:
    text, expected = alone.execute(
        "select v::text, jsonb_path_query_array(v, %s) from (select %s::jsonb) v(v)", [path, json.dumps(value)]
    ).fetchone() or ("", None)

    assert template.found(template.path(path)[0], json.loads(text), lambda count: None) == expected


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"body": {"a": [{"text": "{order.id}"}]}}, "$.body.a[0].text"),
        ({"body": {"a": "{payload.order"}}, "$.body.a"),
        ({"body": {"a": {"$path": "$.a ? (@ > 1)"}}}, '$.body.a."$path"'),
        ({"body": {"a": {"$path": "$.a", "default": 1}}}, "$.body.a"),
        ({"body": "text"}, "$.body"),
        ({"body": {"a": 1}, "batch_size": 10}, "$.body"),
        ({"body": ["{id}"] * 201}, "$.body"),
        ({"body": "x", "headers": {"content-type": "text/plain"}, "cloudevents": True}, "$.body"),
        ({"body": {"a": "x" * 70000}}, "$.body"),
        ({"body": 1}, "$.body"),
    ],
)
def test_a_template_that_can_not_be_used_is_refused(queue: Queue, config: Any, path: str) -> None:
    error = queue.refuses("create_endpoint", "x", "http", URL | config)

    assert error.sqlstate == "22023"
    assert path + " " in str(error.message_primary)


def test_a_template_that_is_nested_too_deeply_is_refused(queue: Queue) -> None:
    body: Any = "x"
    for _ in range(40):
        body = [body]

    assert "is nested too deeply" in str(
        queue.refuses("create_endpoint", "x", "http", URL | {"body": body}).message_primary
    )


def test_curl_shows_the_body_and_masks_a_secret_in_it(queue: Queue) -> None:
    queue.call("set_secret", "pagerduty", "0123456789abcdef")
    body = {"routing_key": {"$secret": "pagerduty"}, "summary": "{payload.order} failed", "n": {"$path": "$.n"}}
    queue.endpoint("pager", URL | {"body": body}, protocol="http")

    words = shlex.split(queue.call("curl", queue.send("pager", {"order": 7, "n": [1]})))

    shown = json.loads(words[words.index("--data-raw") + 1])
    assert shown == {"routing_key": "****", "summary": "7 failed", "n": [1]}


@pytest.mark.parametrize("value", ["one {{of}} many", "{payload.order}", "half{"])
def test_a_secret_with_braces_is_no_part_of_a_body(queue: Queue, value: str) -> None:
    """Filled, it would be another text, which nothing masks."""
    config = URL | {"body": {"key": [{"$secret": "pagerduty"}]}}
    queue.call("set_secret", "pagerduty", value)
    created = queue.refuses("create_endpoint", "pager", "http", config)
    queue.call("set_secret", "pagerduty", "without any")
    queue.endpoint("pager", config, protocol="http")

    changed = queue.refuses("set_secret", "pagerduty", value)

    for told in (created, changed):
        assert 'body.key[0] names secret "pagerduty", whose value has braces' in str(told.message_primary)
