"""From a config to an endpoint."""

from __future__ import annotations

from typing import Any

import pytest
from ulak.messages.cloudevents import CloudEvents
from ulak.messages.delivery import EndpointConfig
from ulak.transports.http import endpoint
from ulak.transports.http.model import ConfigError, OAuth2, Settings


def parse(settings: Settings | None = None, **config: Any) -> Any:
    return endpoint.parse(EndpointConfig(1, "orders", 3, {"url": "https://example.com/hook", **config}), settings)


def test_what_a_config_leaves_open_comes_from_the_settings() -> None:
    parsed = parse(Settings(http_timeout=7, http_connect_timeout=3, cloudevents_source="/shop"), cloudevents=True)

    assert (parsed.profile.timeout, parsed.profile.connect_timeout) == (7, 3)
    assert parsed.cloudevents == CloudEvents("binary", "/shop", None)
    assert (parsed.profile.method, parsed.profile.ssl_verify, parsed.batch_size) == ("POST", True, 1)


def test_connecting_never_gets_more_time_than_the_whole_request() -> None:
    assert parse(timeout=2, connect_timeout=10).profile.connect_timeout == 2


def test_a_rotation_brings_several_keys_and_the_config_one() -> None:
    config = {"url": "https://example.com/", "signing_secret": "whsec_b2xk"}

    assert endpoint.parse(EndpointConfig(1, "a", 1, config, ["whsec_bmV3", "whsec_b2xk"])).signing_keys == (
        b"new",
        b"old",
    )
    assert endpoint.parse(EndpointConfig(1, "a", 1, config)).signing_keys == (b"old",)


def test_a_token_request_shares_the_proxy_but_not_the_client_certificate() -> None:
    parsed = parse(
        auth={"type": "oauth2", "token_url": "https://id.example.com/t", "client_id": "a", "client_secret": "b"},
        tls_client_cert="/c",
        tls_client_key="/k",
        tls_pinned_public_key="sha256//x",
        proxy={"url": "http://proxy.example.com:3128", "no_proxy": "a,b"},
        method="PUT",
    )

    token = parsed.token_profile
    assert isinstance(parsed.auth, OAuth2)
    assert (token.url, token.method, token.proxy) == ("https://id.example.com/t", "POST", parsed.profile.proxy)
    assert token.tls_client_cert is token.tls_client_key is token.tls_pinned_public_key is None


def test_an_uncaptured_body_is_kept_only_for_an_excerpt() -> None:
    assert parse().profile.keep_body == endpoint.EXCERPT
    assert parse(Settings(capture_response=True, response_body_max_size=9)).profile.keep_body == 9


@pytest.mark.parametrize(
    "config",
    [
        {"url": None},
        {"url": "ftp://example.com/"},
        {"url": "https://"},
        {"url": "https://user:password@example.com/"},
        {"url": "file:///etc/passwd"},
        {"url": "https://[::1"},
        {"method": "GET"},
        {"headers": {"Host": "other"}},
        {"headers": {"X-A": "b\nc"}},
        {"auth": {"type": "digest"}},
        {"auth": {"type": "basic", "username": "ada"}},
        {"auth": {"type": "oauth2", "token_url": "gopher://x", "client_id": "a", "client_secret": "b"}},
        {"proxy": {"url": "socks5://example.com"}},
    ],
)
def test_a_config_that_cannot_work_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        parse(**config)


def test_a_method_in_lower_case_is_sent_in_upper_case_and_seconds_may_be_fractions() -> None:
    profile = parse(method="patch", timeout=2.5, connect_timeout=0.5).profile

    assert (profile.method, profile.timeout, profile.connect_timeout) == ("PATCH", 2.5, 0.5)


def test_endpoints_that_share_a_config_keep_what_is_their_own() -> None:
    parser = endpoint.Parser()
    shared = {"headers": {"x-team": "orders"}, "timeout": 7}

    first = parser.parse(EndpointConfig(1, "a", 1, {"url": "https://a.example/in/1", **shared}, ["whsec_bmV3"]))
    second = parser.parse(
        EndpointConfig(2, "b", 5, {"url": "http://10.0.0.1/in/two-4711", **shared}, secrets=["a-named-secret"])
    )
    third = parser.parse(EndpointConfig(3, "c", 1, {"url": "https://c.example/in", **shared, "timeout": 8}))

    assert [each.profile.url for each in (first, second)] == ["https://a.example/in/1", "http://10.0.0.1/in/two-4711"]
    assert (first.signing_keys, second.signing_keys) == ((b"new",), ())
    assert second.config[:3] == (2, "b", 5)
    assert (first.profile.is_named, second.profile.is_named) == (True, False)
    assert [each.profile.timeout for each in (first, second, third)] == [7, 7, 8]
    assert first.lines == second.lines
    told = "two-4711 a-named-secret"
    assert (first.private.hide(told), second.private.hide(told)) == (told, "**** ****")
    assert second.mask.hide(told) == "two-4711 ****"


def test_receivers_share_a_handle_only_if_nothing_but_the_url_differs() -> None:
    parser = endpoint.Parser()
    given = [{"url": "http://a.example/1"}, {"url": "http://b.example/2"}, {"url": "https://a.example/1"}]

    plain, other, secure = [parser.parse(EndpointConfig(1, "a", 1, config)).profile.shape for config in given]

    assert plain == other != secure
