"""AWS Signature Version 4 against the vectors that AWS publishes."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from ulak.transports.http import sigv4
from ulak.transports.http.model import SigV4

NOW = datetime(2015, 8, 30, 12, 36, tzinfo=UTC).timestamp()
AUTH = SigV4("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "us-east-1", "service")
ROOT = "https://example.amazonaws.com/"
TOKEN = (
    "AQoDYXdzEPT//////////wEXAMPLEtc764bNrC9SAPBSM22wDOk4x4HIZ8j4FZTwdQWLWsKWHGBuFqwAeMicRXmxfpSPfIeoIYRqTflfKD8YUuwt"
    "hAx7mSEI/qkPpKPi/kMcGdQrmGdeehM4IC1NtBmUpp2wUE8phUZampKsburEDy0KPkyQDYwT7WZ0wq5VSXDvp75YU9HFvlRd8Tx6q6fE8YQcHNVXA"
    "kiY9q6d+xo0rKwT38xVqr7ZD0u0iPPkUL64lIZbqBAz+scqKmlzm8FDrypNC9Yjc8fPOLn9FX9KSYvKTr4rvx3iSIlTJabIQwj2ICCR/oLxBA=="
)
FORM = "application/x-www-form-urlencoded"

# From the suite: name, method, url, content type, body, signature.
VECTORS = [
    ("get-vanilla", "GET", ROOT, None, b"", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
    ("get-utf8", "GET", ROOT + "ሴ", None, b"", "8318018e0b0f223aa2bbf98705b62bb787dc9c0e678f255a891fd03141be5d85"),
    ("post-vanilla", "POST", ROOT, None, b"", "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b"),
    (
        "post-vanilla-query",
        "POST",
        ROOT + "?Param1=value1",
        None,
        b"",
        "28038455d6de14eafc1f9222cf5aa6f1a96197d7deb8263271d420d138af7f11",
    ),
    (
        "get-vanilla-query-order-key-case",
        "GET",
        ROOT + "?Param2=value2&Param1=value1",
        None,
        b"",
        "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500",
    ),
    (
        "post-x-www-form-urlencoded",
        "POST",
        ROOT,
        FORM,
        b"Param1=value1",
        "ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a",
    ),
    (
        "post-x-www-form-urlencoded-parameters",
        "POST",
        ROOT,
        FORM + "; charset=utf8",
        b"Param1=value1",
        "1a72ec8f64bd914b0e42e42607c7fbce7fb2c7465f63e3092b3b0d39fa77a6fe",
    ),
]


def signature(headers: dict[str, str]) -> str:
    return headers["authorization"].rpartition("Signature=")[2]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: str(vector[0]))
def test_a_published_vector_gives_its_published_signature(
    vector: tuple[str, str, str, str | None, bytes, str],
) -> None:
    _, method, url, content_type, body, expected = vector
    headers = {"content-type": content_type} if content_type else {}

    assert signature(sigv4.sign(AUTH, method, url, headers, body, NOW)) == expected


def test_the_documentations_example_request_gives_its_authorization() -> None:
    auth = SigV4("AKIDEXAMPLE", AUTH.secret_key, "us-east-1", "iam")
    url = "https://iam.amazonaws.com/?Action=ListUsers&Version=2010-05-08"

    added = sigv4.sign(auth, "GET", url, {"content-type": FORM + "; charset=utf-8"}, b"", NOW)

    assert added["x-amz-date"] == "20150830T123600Z"
    assert added["authorization"] == (
        "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/iam/aws4_request, "
        "SignedHeaders=content-type;host;x-amz-date, "
        "Signature=5d672d79c15b13162d9279b0855cfba6789a8edb4c82c400e06b5924a6f2b5d7"
    )


def test_a_session_token_is_sent_and_signed() -> None:
    auth = SigV4(AUTH.access_key, AUTH.secret_key, AUTH.region, AUTH.service, TOKEN)

    added = sigv4.sign(auth, "POST", ROOT, {}, b"", NOW)

    assert added["x-amz-security-token"] == TOKEN
    assert signature(added) == "85d96828115b5dc0cfc3bd16ad9e210dd772bbebba041836c64533a82be05ead"


def test_s3_wants_the_bodys_digest() -> None:
    auth = SigV4(AUTH.access_key, AUTH.secret_key, AUTH.region, "s3")

    added = sigv4.sign(auth, "PUT", ROOT + "a%20b", {}, b"", NOW)

    assert added["x-amz-content-sha256"] == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert "x-amz-content-sha256" in added["authorization"]


def test_only_headers_that_proxies_leave_alone_are_signed() -> None:
    added = sigv4.sign(AUTH, "POST", ROOT, {"user-agent": "ulak", "x-amz-target": "t", "accept": "*/*"}, b"", NOW)

    assert "SignedHeaders=host;x-amz-date;x-amz-target," in added["authorization"]


def test_runs_of_spaces_in_a_header_count_as_one() -> None:
    spaced, plain = (sigv4.sign(AUTH, "POST", ROOT, {"x-amz-meta": value}, b"", NOW) for value in ("  a   b ", "a b"))

    assert signature(spaced) == signature(plain)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://Example.com/", "example.com"),
        ("https://example.com:443/", "example.com"),
        ("http://example.com:443/", "example.com:443"),
        ("http://[2001:db8::1]:80/", "[2001:db8::1]"),
        ("https://example.com:8443/", "example.com:8443"),
    ],
)
def test_the_signed_host_is_the_one_that_libcurl_sends(url: str, expected: str) -> None:
    assert sigv4.host(url) == expected
