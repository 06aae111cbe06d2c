"""The pages, and the guards before each of them."""

from __future__ import annotations

import datetime
import json
import os
import re
import secrets
import uuid
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode, urlsplit

import psycopg
from flask import Flask, abort, g, make_response, redirect, render_template, request, url_for
from werkzeug.datastructures import MultiDict
from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Response

from ulak_console import actions, chart, report
from ulak_console.sessions import LONGEST_HOURS, LoginRefused, Session, Sessions

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
HOURS = (1, 6, 24, 168)
REFRESH = (0, 5, 15, 60)
# Forms are short; nobody sends us more.
LARGEST_REQUEST = 64 << 10

# What the lists can be filtered by; the names are parameters of the functions that find them.
STATUSES = "pending, processing, completed, failed, expired, cancelled"
MESSAGE_FILTERS = (
    actions.Field("endpoint", "endpoint"),
    actions.Field("status", "status", hint=STATUSES),
    actions.Field("since", "sent since", "timestamptz", "a day ago, if finished"),
    actions.Field("idempotency_key", "idempotency key"),
    actions.Field("correlation_id", "correlation id", "uuid"),
    actions.LIMIT._replace(hint="100"),
)
LETTER_FILTERS = (
    actions.Field("endpoint", "endpoint"),
    actions.ERROR,
    *actions.LETTERS[2:4],
    actions.Field("status", "status", hint="failed, redriven, discarded"),
    actions.LIMIT._replace(hint="100"),
)
# An endpoint's last hours in 60 steps.
TRAFFIC = """
    select
        b.at,
        coalesce(sum(t.delivered), 0)::bigint as delivered,
        coalesce(sum(t.failed), 0)::bigint as failed,
        max(t.latency_max_ms) as slowest
    from generate_series(
        date_trunc('minute', now()) - make_interval(hours => %(hours)s) + make_interval(mins => %(hours)s),
        date_trunc('minute', now()),
        make_interval(mins => %(hours)s)
    ) b (at)
    left join ulak.endpoint_stats t
        on t.endpoint_id = %(id)s and t.minute > b.at - make_interval(mins => %(hours)s) and t.minute <= b.at
    group by b.at
    order by b.at
"""
CHARTS = (("Delivered and failed", ("delivered", "failed")), ("Slowest request, ms", ("slowest",)))

POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'self'{style}; img-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)

View = Callable[..., Any]


def create_app(environment: Mapping[str, str] = os.environ) -> Flask:
    """ULAK_CONSOLE_DATABASE: how to reach the database, without user and password. ULAK_CONSOLE_HOSTS: the names under
    which browsers may reach us, besides those of this machine. ULAK_CONSOLE_HTTPS=1: they do so by https."""
    app = Flask(__name__)
    app.config["MAX_CONTENT_LENGTH"] = LARGEST_REQUEST
    hosts = {*LOOPBACK, *environment.get("ULAK_CONSOLE_HOSTS", "").split()}
    is_https = environment.get("ULAK_CONSOLE_HTTPS") == "1"
    cookie = "__Host-ulak" if is_https else "ulak"
    sessions = Sessions(environment.get("ULAK_CONSOLE_DATABASE", ""))

    def set_cookie(response: Response, name: str, value: str, seconds: int) -> None:
        response.set_cookie(name, value, max_age=seconds, secure=is_https, httponly=True, samesite="Strict", path="/")

    @app.before_request
    def guard() -> Any:
        # A foreign name that was made to lead to this machine (DNS rebinding).
        if _host_name(request.host) not in hosts:
            abort(400, "This host is not known here: name it in ULAK_CONSOLE_HOSTS.")
        if request.method == "POST" and not _is_from_here():
            abort(403, "This request came from another site.")
        if request.endpoint in ("login", "static"):
            return None
        g.failures = []
        g.session = sessions.find(request.cookies.get(cookie))
        if g.session is None:
            return redirect(url_for("login"), 303)
        return None

    @app.after_request
    def protect(response: Response) -> Response:
        style = f" '{g.style_hash}'" if "style_hash" in g else ""
        response.headers["Content-Security-Policy"] = POLICY.format(style=style)
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["X-Frame-Options"] = "DENY"
        # With no-referrer a browser would not tell us where a form comes from.
        response.headers["Referrer-Policy"] = "same-origin"
        response.headers["Cross-Origin-Opener-Policy"] = "same-origin"
        response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        if request.endpoint != "static":
            response.headers["Cache-Control"] = "no-store"
        return response

    app.add_template_filter(_plain, "plain")

    @app.context_processor
    def known() -> dict[str, Any]:
        session: Session | None = g.get("session")
        return {
            "session": session,
            "token": session.form_token if session else None,
            "link": link,
            "last_done": _last_done,
            "action_filters": _filters_of,
            "as_of": datetime.datetime.now(datetime.UTC),
            "failures": g.get("failures", []),
        }

    @app.route("/login", methods=["GET", "POST"])
    def login() -> Any:
        error, status = None, 200
        if request.method == "POST":
            if not sessions.is_login_token(request.form.get("token", ""), request.cookies.get(cookie + "-login", "")):
                abort(403, "This form is too old. Go back and load it again.")
            try:
                secret = sessions.login(request.form.get("role", ""), request.form.get("password", ""))
            except LoginRefused as refused:
                error, status = str(refused), 403
            else:
                # A session that this browser had before is over.
                sessions.end(request.cookies.get(cookie))
                answer = redirect(url_for("overview"), 303)
                set_cookie(answer, cookie, secret, LONGEST_HOURS * 3600)
                return answer
        name = secrets.token_urlsafe(16)
        page = render_template("login.html", error=error, login_token=sessions.login_token(name))
        answer = make_response(page, status)
        set_cookie(answer, cookie + "-login", name, 3600)
        return answer

    @app.post("/logout")
    def logout() -> Any:
        _require_token("logout", {})
        sessions.end(request.cookies.get(cookie))
        answer = redirect(url_for("login"), 303)
        set_cookie(answer, cookie, "", 0)
        return answer

    @app.get("/")
    def overview() -> Any:
        hours = _one_of("hours", HOURS, 6)
        pages = _part("The report", "select ulak.report(%s) as page", [hours])
        shown = None
        try:
            shown = report.embedded(pages[0]["page"], link, g.session.is_admin) if pages else None
        except (ElementTree.ParseError, AssertionError) as error:
            g.failures.append(f"The report can't be read: {error}")
        if shown is not None:
            g.style_hash = shown.style_hash
        # Instead of the report: what it takes to go on from here.
        endpoints = (
            [] if shown else _part("The list", "select name, circuit_state from ulak.endpoint_list order by name")
        )
        findings = [] if shown else _part("The diagnosis", "select severity, finding, fix from ulak.doctor()")
        refresh = _one_of("refresh", REFRESH, 15)
        return render_template(
            "overview.html",
            report=shown,
            endpoints=endpoints,
            findings=findings,
            hours=hours,
            spans=HOURS,
            refresh=refresh,
            refreshes=REFRESH,
        )

    @app.get("/search")
    def search() -> Any:
        """Whatever somebody has at hand: an endpoint, the id of a message, or an id or key that it was sent with."""
        wanted = request.args.get("q", "").strip()
        if wanted.isascii() and wanted.isdigit() and len(wanted) <= 18:
            return redirect(link("message", id=wanted), 303)
        named = (
            "select name, protocol, circuit_state from ulak.endpoint_list where name ilike %s order by name limit 50"
        )
        pattern = "%" + re.sub(r"([\\%_])", r"\\\1", wanted) + "%"
        endpoints = _part("The endpoints", named, [pattern]) if wanted else []
        if any(each["name"] == wanted for each in endpoints):
            return redirect(link("endpoint", name=wanted), 303)
        by = ("message_id", "correlation_id") if _is_uuid(wanted) else ("idempotency_key",)
        messages = []
        for key in by if wanted else ():
            query = f"select * from ulak.find_messages(p_{key} => %s, p_since => '-infinity', p_limit => 100)"
            messages += _part("The messages", query, [wanted])
        if len(messages) == 1 and not endpoints:
            return redirect(link("message", id=messages[0]["id"]), 303)
        return render_template("search.html", wanted=wanted, endpoints=endpoints, messages=messages)

    @app.get("/messages")
    def messages() -> Any:
        return listed("messages", "find_messages", MESSAGE_FILTERS, ("retry_now", "purge"))

    @app.get("/letters")
    def letters() -> Any:
        return listed("letters", "find_letters", LETTER_FILTERS, ("redrive", "discard"))

    def listed(view: str, function: str, filters: Sequence[actions.Field], names: Sequence[str]) -> Any:
        """A list with filters, a selection, and what may be done with the selected ones or with all that match."""
        given = {field.name: value for field in filters if (value := request.args.get(field.name, "").strip())}
        look = actions.Action(view, "", function, filters, lambda *_: actions.Preview(""), lambda *_: "")
        rows, errors = [], {}
        try:
            with g.session.reading() as cursor:
                errors = actions.problems(cursor, look, given)
                if not errors:
                    rows = cursor.execute(look.statement(cursor, {"limit": "100", **given}).encode()).fetchall()
        except psycopg.Error as error:
            if _is_over(error):
                raise
            errors = {actions.field_of(look, error): _said(error)}
        shown = [actions.ACTIONS[name] for name in names] if g.session.is_admin else []
        page = render_template(
            "list.html", view=view, filters=filters, given=given, errors=errors, rows=rows, actions=shown
        )
        return page, 400 if errors else 200

    @app.get("/message")
    def message() -> Any:
        id = request.args.get("id", "").strip()
        if not id.isascii() or not id.isdigit() or len(id) > 18:
            abort(400, "The id of a message is the number that send() returned.")
        told = _part("The story", "select * from ulak.explain(%s)", [int(id)])
        tried = _part("The attempts", "select * from ulak.history(%s)", [int(id)])
        if not told and not tried and "failure" in g:
            g.failures = []
            raise g.failure
        shown, content = [], None
        if g.session.is_admin:
            dead = "select id from ulak.dlq where original_message_id = %s and status = 'failed'"
            for letter in _part("The dead letters", dead, [int(id)]):
                shown.append((actions.ACTIONS["redrive_message"], letter["id"]))
            found = _part(
                "The payload", "select status, payload, headers, metadata from ulak.messages where id = %s", [id]
            )
            if found:
                content = {name: found[0][name] for name in ("payload", "headers", "metadata") if found[0][name]}
                names = {"pending": ("reschedule", "cancel"), "processing": (), "held": ()}.get(
                    found[0]["status"], ("replay",)
                )
                shown += [(actions.ACTIONS[name], int(id)) for name in names]
        return render_template("message.html", id=int(id), told=told, tried=tried, actions=shown, content=content)

    @app.get("/endpoint")
    def endpoint() -> Any:
        name = request.args.get("name", "")
        hours = _one_of("hours", HOURS, 6)
        with g.session.reading() as cursor:
            health = cursor.execute("select * from ulak.get_endpoint_health(%s)", [name]).fetchone()
        listing = "select id, config, description, disable_at from ulak.endpoint_list where name = %s"
        config = next(iter(_part("The config", listing, [name])), None)
        traffic = _part("The traffic", TRAFFIC, {"id": config["id"], "hours": hours}) if config else []
        newest = "select * from ulak.find_messages(p_endpoint => %s, p_limit => 10)"
        dead = "select * from ulak.find_letters(p_endpoint => %s, p_limit => 10)"
        grants = "select role_name, may_work, may_send, granted_at from ulak.endpoint_grants where endpoint_id = %s"
        useless = {
            "enable": health["enabled"],
            "disable": not health["enabled"],
            "reset": health["circuit_state"] == "closed",
        }
        shown = [
            each
            for each in actions.ACTIONS.values()
            if g.session.is_admin and each.fields[0].name == "endpoint" and not useless.get(each.name)
        ]
        for column in ("endpoint_name", "last_hour", "pending_is_estimate"):
            health.pop(column, None)
        if config:
            # The countdown of disable_after.
            health["disable_at"] = config["disable_at"]
        return render_template(
            "endpoint.html",
            name=name,
            health=health,
            config=config,
            actions=shown,
            hours=hours,
            spans=HOURS,
            charts=[chart.of(title, kinds, traffic) for title, kinds in CHARTS],
            messages=_part("The messages", newest, [name]),
            letters=_part("The dead letters", dead, [name]),
            grants=_part("The grants", grants, [config["id"]]) if config and g.session.is_admin else None,
        )

    @app.get("/act/<name>")
    def act(name: str) -> Any:
        """Shows what would happen, and offers to confirm it."""
        session = _as_admin()
        action = actions.ACTIONS.get(name) or abort(404, "There is no such action.")
        given = _given(action, request.args)
        # A form that was opened to be filled in.
        is_asked = all(given.get(field.name) for field in action.fields if field.is_needed)
        preview, errors = None, {}
        try:
            with session.reading() as cursor:
                errors = actions.problems(cursor, action, given)
                if is_asked and not errors:
                    preview = action.preview(cursor, given)
        except psycopg.Error as error:
            if _is_over(error):
                raise
            errors = {actions.field_of(action, error): _said(error)}
        return _form(action, given, preview, errors)

    @app.post("/act/<name>")
    def confirm(name: str) -> Any:
        session = _as_admin()
        action = actions.ACTIONS.get(name) or abort(404, "There is no such action.")
        given = _given(action, request.form)
        _require_token(name, given)
        try:
            with session.writing() as cursor:
                session.told = action.perform(cursor, given)
        except psycopg.Error as error:
            if _is_over(error):
                raise
            return _form(action, given, None, {actions.field_of(action, error): _said(error)})
        if "endpoint" in given:
            return redirect(link("endpoint", name=given["endpoint"]), 303)
        return redirect(url_for("overview"), 303)

    @app.errorhandler(psycopg.Error)
    def refused(error: psycopg.Error) -> Any:
        if _is_over(error):
            sessions.end(request.cookies.get(cookie))
            return redirect(url_for("login"), 303)
        return render_template("error.html", title="The database refused this", facts=[_said(error)]), 400

    @app.errorhandler(HTTPException)
    def wrong(error: HTTPException) -> Any:
        return render_template("error.html", title=error.name, facts=[error.description]), error.code

    return app


def link(view: str, /, action: str | None = None, **values: object) -> str:
    """The address of a page with its parameters; url_for() uses the word endpoint for something else."""
    address = url_for(view, name=action) if action else url_for(view)
    asked = urlencode({name: value for name, value in values.items() if value is not None})
    return f"{address}?{asked}" if asked else address


def _host_name(host: str) -> str:
    """Without the port."""
    return host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host


def _is_from_here() -> bool:
    """A browser says where each form comes from; a request that doesn't is refused."""
    origin = urlsplit(request.headers.get("Origin", ""))
    site = request.headers.get("Sec-Fetch-Site", "same-origin")
    return origin.scheme in ("http", "https") and origin.netloc == request.host and site == "same-origin"


def _is_ended(error: psycopg.Error) -> bool:
    """The server has ended the session: an administrator did, or nobody used it."""
    return error.diag.sqlstate in ("57P01", "57P02", "57P05")


def _part(name: str, query: str, parameters: Sequence[object] | Mapping[str, object] = ()) -> list[Any]:
    """One part of a page. If the database refuses it, only this part is missing, and the page says so; if the session
    has ended, there is no page."""
    try:
        with g.session.reading() as cursor:
            return list(cursor.execute(query, parameters).fetchall())
    except (psycopg.Error, UnicodeError) as error:
        if isinstance(error, psycopg.Error) and _is_over(error):
            raise
        g.failure = error
        g.failures.append(f"{name} can't be shown: {error}")
        return []


def _is_over(error: psycopg.Error) -> bool:
    """There is no session to go on with."""
    return (isinstance(error, psycopg.OperationalError) and error.diag.sqlstate is None) or _is_ended(error)


def _said(error: psycopg.Error) -> str:
    diagnosis = error.diag
    facts = [diagnosis.message_primary or str(error), diagnosis.message_detail, diagnosis.message_hint]
    return " \u00b7 ".join(fact for fact in facts if fact)


def _last_done() -> str | None:
    """What the last action has done, once."""
    session: Session | None = g.get("session")
    if session is None:
        return None
    told, session.told = session.told, None
    return told


def _form(
    action: actions.Action, given: Mapping[str, str], preview: actions.Preview | None, errors: Mapping[str, str]
) -> Any:
    bound = (preview.bound if preview else None) or given
    page = render_template("act.html", action=action, given=given, bound=bound, preview=preview, errors=errors)
    return page, 400 if errors else 200


def _filters_of(action: actions.Action, given: Mapping[str, str]) -> dict[str, str]:
    """The filters of a list that the action has, too."""
    known = {field.name for field in action.fields} - {"limit"}
    return {name: value for name, value in given.items() if name in known}


def _is_uuid(text: str) -> bool:
    try:
        uuid.UUID(text)
    except ValueError:
        return False
    return True


def _as_admin() -> Session:
    session: Session = g.session
    if not session.is_admin:
        abort(403, "Only a member of ulak_admin may do this.")
    return session


def _require_token(action: str, given: Mapping[str, str]) -> None:
    if not g.session.is_token(request.form.get("token", ""), action, given):
        abort(403, "This form belongs to another session, or was changed. Go back and load it again.")


def _given(action: actions.Action, form: MultiDict[str, str]) -> dict[str, str]:
    given = {field.name: value for field in action.fields if (value := form.get(field.name, "").strip())}
    # What was ticked in a list.
    if ticked := form.getlist("tick"):
        given = {"ids": "{" + ",".join(ticked) + "}"}
    return given


def _plain(value: object) -> str:
    """A value of the database, as people read it. Times that come in JSON are text."""
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\S*", value):
        value = datetime.datetime.fromisoformat(value)
    if isinstance(value, datetime.datetime):
        return f"{value.astimezone(datetime.UTC):%d %b %H:%M:%S}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1f}"
    return "" if value is None else str(value)


def _one_of(name: str, allowed: tuple[int, ...], otherwise: int) -> int:
    given = request.args.get(name, type=int)
    return given if given in allowed else otherwise
