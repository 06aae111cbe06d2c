"""The JSON Schema validator: each keyword, the path it names, and what it refuses to understand."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.errors import refused

DB = psycopg.Connection[Any]


def violation(db: DB, schema: Any, value: Any) -> str | None:
    query = "select '$' || v[1] || ' ' || v[2] from ulak_private.json_violation(%s, %s) v"
    row = db.execute(query, [json.dumps(schema), json.dumps(value)]).fetchone()
    assert row is not None
    return None if row[0] is None else str(row[0])


# schema, what it accepts, what it refuses with which words.
KEYWORDS: list[tuple[Any, list[Any], dict[str, str]]] = [
    (True, [1, None, {}], {}),
    (False, [], {"1": "$ is not allowed"}),
    ({}, [1, None, {}, [], "x"], {}),
    ({"type": "string"}, ["", "x"], {"1": "$ must be of type string", "null": "$ must be of type string"}),
    (
        {"type": "integer"},
        [1, 1.0, -7, 10**30],
        {"1.5": "$ must be of type integer", '"1"': "$ must be of type integer"},
    ),
    ({"type": "number"}, [1, 1.5], {"true": "$ must be of type number"}),
    ({"type": "boolean"}, [True, False], {"0": "$ must be of type boolean"}),
    ({"type": "null"}, [None], {"0": "$ must be of type null"}),
    ({"type": ["string", "null"]}, ["x", None], {"1": "$ must be of type string or null"}),
    ({"const": {"a": 1}}, [{"a": 1}], {'{"a": 1, "b": 2}': '$ must be {"a": 1}'}),
    ({"const": None}, [None], {"0": "$ must be null"}),
    ({"const": "x"}, ["x"], {'"y"': '$ must be "x"'}),
    ({"enum": ["a", 1, None]}, ["a", 1, 1.0, None], {'"b"': "$ must be one of a, 1, null"}),
    # Containment is not membership.
    ({"enum": [{"a": 1, "b": 2}]}, [{"a": 1, "b": 2}], {'{"a": 1}': '$ must be one of {"a": 1, "b": 2}'}),
    (
        {"enum": [["a", "b"]]},
        [["a", "b"]],
        {'"a"': '$ must be one of ["a", "b"]', '["a"]': '$ must be one of ["a", "b"]'},
    ),
    ({"required": ["a"]}, [{"a": None}, 1, []], {"{}": "$.a is required", '{"b": 1}': "$.a is required"}),
    (
        {"properties": {"a": {"type": "string"}}},
        [{"a": "x"}, {}, {"b": 1}, 1],
        {'{"a": 1}': "$.a must be of type string"},
    ),
    ({"properties": {"a": False}}, [{}, {"b": 1}], {'{"a": 1}': "$.a is not allowed"}),
    ({"additionalProperties": False}, [{}], {'{"a": 1}': "$.a is not a known key"}),
    (
        {"properties": {"a": True}, "additionalProperties": {"type": "string"}},
        [{"a": 1, "b": "x"}],
        {'{"b": 1}': "$.b must be of type string"},
    ),
    ({"items": {"type": "string"}}, [[], ["x"], {"a": 1}], {'["x", 1]': "$[1] must be of type string"}),
    ({"items": False}, [[]], {"[1]": "$[0] is not allowed"}),
    ({"minItems": 1}, [[1], {}], {"[]": "$ must have at least 1 items"}),
    ({"maxItems": 1}, [[1], []], {"[1, 2]": "$ must have at most 1 items"}),
    ({"minLength": 2}, ["ab", 1], {'"a"': "$ must have at least 2 characters"}),
    # Characters, not bytes.
    ({"maxLength": 2}, ["ab", "éé", "😀😀"], {'"abc"': "$ must have at most 2 characters"}),
    ({"pattern": "^[a-z]+$"}, ["ab", 1], {'"A"': "$ must match the pattern ^[a-z]+$"}),
    ({"pattern": "b"}, ["abc"], {'"a"': "$ must match the pattern b"}),
    ({"minimum": 2}, [2, "1"], {"1.9": "$ must be at least 2"}),
    ({"maximum": 2}, [2, -5], {"2.1": "$ must be at most 2"}),
    ({"exclusiveMinimum": 0}, [0.1], {"0": "$ must be greater than 0"}),
    ({"exclusiveMaximum": 1}, [0.9], {"1": "$ must be less than 1"}),
    (
        {"title": "t", "description": "d", "default": 1, "examples": [1], "$schema": "s", "$id": "i", "$comment": "c"},
        [1],
        {},
    ),
]


@pytest.mark.parametrize(("schema", "accepted", "refusals"), KEYWORDS, ids=[json.dumps(case[0]) for case in KEYWORDS])
def test_a_keyword_accepts_and_refuses(
    module_session: DB, schema: Any, accepted: list[Any], refusals: dict[str, str]
) -> None:
    module_session.execute("select ulak_private.check_json_schema(%s)", [json.dumps(schema)])

    assert [value for value in accepted if violation(module_session, schema, value) is not None] == []
    assert {text: violation(module_session, schema, json.loads(text)) for text in refusals} == refusals


def test_the_path_leads_through_objects_and_arrays(module_session: DB) -> None:
    price = {"type": "object", "properties": {"price": {"minimum": 0}}}
    schema = {"properties": {"order": {"properties": {"items": {"type": "array", "items": price}}}}}

    found = violation(module_session, schema, {"order": {"items": [{}, {"price": 1}, {"price": -1}]}})

    assert found == "$.order.items[2].price must be at least 0"


def test_odd_keys_are_quoted_in_the_path(module_session: DB) -> None:
    found = violation(module_session, {"additionalProperties": {"type": "string"}}, {'a "b".c': 1})

    assert found == r'$["a \"b\".c"] must be of type string'


def test_an_unknown_key_is_answered_with_the_nearest(module_session: DB) -> None:
    schema = {"properties": {"amount": True, "currency": True}, "additionalProperties": False}

    row = module_session.execute(
        "select (ulak_private.json_violation(%s, %s))[3]", [json.dumps(schema), '{"amuont": 1}']
    )

    assert row.fetchone() == ('Did you mean "amount"?',)


def test_no_message_repeats_the_value(module_session: DB) -> None:
    secret = "hunter2"
    schemas: list[Any] = [
        {"type": "integer"},
        {"const": 1},
        {"enum": [1]},
        {"maxLength": 1},
        {"minLength": 99},
        {"pattern": "^x"},
        False,
    ]

    found = [violation(module_session, schema, secret) for schema in schemas]

    assert None not in found
    assert [text for text in found if secret in str(text)] == []


BAD_SCHEMAS = {
    '{"format": "date"}': "$.format is not a known key",
    '{"$ref": "#/x"}': "$.$ref is not a known key",
    '{"anyOf": [{}]}': "$.anyOf is not a known key",
    '{"properties": {"a": {"minimun": 1}}}': "$.properties.a.minimun is not a known key",
    '{"items": {"uniqueItems": true}}': "$.items.uniqueItems is not a known key",
    '{"additionalProperties": {"items": {"x": 1}}}': "$.additionalProperties.items.x is not a known key",
    '{"items": [{}]}': "$.items must be of type object or boolean",
    '{"type": "strin"}': "$.type must match",
    '{"type": ["string", "strin"]}': "$.type[1] must be one of",
    '{"type": []}': "$.type must have at least 1 items",
    '{"required": "a"}': "$.required must be of type array",
    '{"required": [1]}': "$.required[0] must be of type string",
    '{"enum": []}': "$.enum must have at least 1 items",
    '{"minimum": "1"}': "$.minimum must be of type number",
    '{"exclusiveMinimum": true}': "$.exclusiveMinimum must be of type number",
    '{"minLength": -1}': "$.minLength must be at least 0",
    '{"minLength": 1.5}': "$.minLength must be of type integer",
    '{"properties": {"a": {"pattern": "("}}}': "$.properties.a.pattern is not a valid regular expression",
    '{"properties": {"a b": {"pattern": "("}}}': '$.properties["a b"].pattern is not a valid regular expression',
    '{"properties": {"a": 1}}': "$.properties.a must be of type object or boolean",
    "[]": "$ must be of type object or boolean",
    '"string"': "$ must be of type object or boolean",
    "null": "$ must be of type object or boolean",
}


@pytest.mark.parametrize("schema", BAD_SCHEMAS)
def test_a_schema_that_cannot_be_enforced_is_refused(module_session: DB, schema: str) -> None:
    error = refused(module_session, "select ulak_private.check_json_schema(%s)", schema)

    assert error.sqlstate == "22023"
    assert error.message_primary is not None
    assert error.message_primary.startswith("invalid JSON Schema: " + BAD_SCHEMAS[schema])


def test_a_misspelt_keyword_is_answered_with_the_nearest(module_session: DB) -> None:
    assert (
        refused(module_session, """select ulak_private.check_json_schema('{"minimun": 1}')""").message_hint
        == 'Did you mean "minimum"?'
    )


def test_the_schemas_of_ulak_itself_are_valid(module_session: DB) -> None:
    checked = module_session.execute(
        """
        select ulak_private.check_json_schema(schema)
        from (
            values
                (ulak_private.json_schema_keywords()),
                (ulak_private.config_schema('http')),
                (ulak_private.config_schema('pull')),
                (ulak_private.retry_policy_schema()),
                (ulak_private.events_schema())
        ) as s (schema)
        """
    ).fetchall()

    assert checked == [(True,)] * 5


def valid(schema: Any, value: Any) -> bool:
    """The standard's rules again, in Python, for the keywords that the generator below uses."""
    if isinstance(schema, bool):
        return schema
    kinds = {
        "object": isinstance(value, dict),
        "array": isinstance(value, list),
        "string": isinstance(value, str),
        "integer": isinstance(value, int) and not isinstance(value, bool),
        "boolean": isinstance(value, bool),
        "null": value is None,
    }
    if "type" in schema and not any(kinds[kind] for kind in [schema["type"]] if kind in kinds):
        return False
    if "enum" in schema and json.dumps(value, sort_keys=True) not in [
        json.dumps(e, sort_keys=True) for e in schema["enum"]
    ]:
        return False
    if kinds["integer"] and value < schema.get("minimum", value):
        return False
    if kinds["string"] and len(value) > schema.get("maxLength", len(value)):
        return False
    if kinds["array"]:
        fits = len(value) >= schema.get("minItems", 0)
        return fits and all(valid(schema.get("items", True), each) for each in value)
    if kinds["object"]:
        known = schema.get("properties", {})
        others = schema.get("additionalProperties", True)
        return all(key in value for key in schema.get("required", [])) and all(
            valid(known.get(key, others), each) for key, each in value.items()
        )
    return True


KEYS = st.sampled_from(["a", "b", "c"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("xyz", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    st.booleans() | st.just({}),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", "array", "string", "integer", "boolean", "null"]),
            "enum": st.lists(VALUES, min_size=1, max_size=3),
            "minimum": st.integers(-3, 3),
            "maxLength": st.integers(0, 3),
            "minItems": st.integers(0, 2),
            "items": inner,
            "required": st.lists(KEYS, max_size=2),
            "properties": st.dictionaries(KEYS, inner, max_size=3),
            "additionalProperties": inner,
        },
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=SCHEMAS, value=VALUES)
def test_verdicts_are_those_of_the_standard(module_session: DB, schema: Any, value: Any) -> None:
    module_session.execute("select ulak_private.check_json_schema(%s)", [json.dumps(schema)])

    assert (violation(module_session, schema, value) is None) == valid(schema, value)
