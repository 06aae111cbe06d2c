"""The pages, and the guards before each of them."""

from __future__ import annotations

import datetime
import os
import re
import secrets
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode, urlsplit

import psycopg
from flask import Flask, abort, g, make_response, redirect, render_template, request, url_for
from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Response

from ulak_console import actions, report
from ulak_console.sessions import LONGEST_HOURS, LoginRefused, Session, Sessions

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
HOURS = (1, 6, 24, 168)
REFRESH = (0, 5, 15, 60)
# Forms are short; nobody sends us more.
LARGEST_REQUEST = 64 << 10

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
        told, g.session.told = g.session.told, None
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
            told=told,
        )

    @app.get("/message")
    def message() -> Any:
        id = request.args.get("id", "").strip()
        if not id.isascii() or not id.isdigit() or len(id) > 18:
            abort(400, "The id of a message is the number that send() returned.")
        told = _part("The story", "select * from ulak.explain(%s)", [int(id)])
        tried = _part("The attempts", "select * from ulak.history(%s)", [int(id)])
        letters, archived = [], []
        if not told and not tried and "failure" in g:
            g.failures = []
            raise g.failure
        if g.session.is_admin:
            dead = "select id from ulak.dlq where original_message_id = %s and status = 'failed'"
            letters = _part("The dead letters", dead, [int(id)])
            archived = _part("The archive", "select id from ulak.archive where id = %s", [int(id)])
        return render_template("message.html", id=int(id), told=told, tried=tried, letters=letters, archived=archived)

    @app.get("/endpoint")
    def endpoint() -> Any:
        name = request.args.get("name", "")
        with g.session.reading() as cursor:
            health = cursor.execute("select * from ulak.get_endpoint_health(%s)", [name]).fetchone()
            config = cursor.execute(
                "select config, description from ulak.endpoint_list where name = %s", [name]
            ).fetchone()
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
        return render_template("endpoint.html", name=name, health=health, config=config, actions=shown)

    @app.get("/act/<name>")
    def act(name: str) -> Any:
        """Looks, and offers to confirm what it has seen."""
        with _as_admin().reading() as cursor:
            action = actions.ACTIONS.get(name) or abort(404, "There is no such action.")
            given = _given(action, request.args)
            # A form that was opened to be filled in.
            is_asked = all(given.get(field.name) for field in action.fields if field.is_needed)
            preview, error = None, None
            if is_asked:
                try:
                    preview = action.preview(cursor, given)
                except actions.Missing as missing:
                    error = str(missing)
        bound = (preview.bound if preview else None) or given
        return render_template("act.html", action=action, given=given, bound=bound, preview=preview, error=error)

    @app.post("/act/<name>")
    def confirm(name: str) -> Any:
        with _as_admin().writing() as cursor:
            action = actions.ACTIONS.get(name) or abort(404, "There is no such action.")
            given = _given(action, request.form)
            _require_token(name, given)
            g.session.told = action.perform(cursor, given)
        return redirect(url_for("overview"), 303)

    @app.errorhandler(psycopg.Error)
    def refused(error: psycopg.Error) -> Any:
        if (isinstance(error, psycopg.OperationalError) and error.diag.sqlstate is None) or _is_ended(error):
            sessions.end(request.cookies.get(cookie))
            return redirect(url_for("login"), 303)
        diagnosis = error.diag
        facts = [diagnosis.message_primary or str(error), diagnosis.message_detail, diagnosis.message_hint]
        return render_template("error.html", title="The database refuses", facts=facts), 400

    @app.errorhandler(HTTPException)
    def wrong(error: HTTPException) -> Any:
        return render_template("error.html", title=error.name, facts=[error.description]), error.code

    return app


def link(view: str, /, action: str | None = None, **values: object) -> str:
    """Of a page, with what it is asked for in its query; url_for() has a use of its own for the word endpoint."""
    address = url_for(view, name=action) if action else url_for(view)
    asked = urlencode({name: value for name, value in values.items() if value is not None})
    return f"{address}?{asked}" if asked else address


def _host_name(host: str) -> str:
    """Without the port."""
    return host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host


def _is_from_here() -> bool:
    """A browser says with each form where it comes from, and who doesn't say it gets nothing."""
    origin = urlsplit(request.headers.get("Origin", ""))
    site = request.headers.get("Sec-Fetch-Site", "same-origin")
    return origin.scheme in ("http", "https") and origin.netloc == request.host and site == "same-origin"


def _is_ended(error: psycopg.Error) -> bool:
    """The server has ended the session: an administrator did, or nobody used it."""
    return error.diag.sqlstate in ("57P01", "57P02", "57P05")


def _part(name: str, query: str, parameters: Sequence[object] = ()) -> list[Any]:
    """Of a page. What the database refuses costs this part alone, and the page says so; a session that ended costs the
    page."""
    try:
        with g.session.reading() as cursor:
            return list(cursor.execute(query, parameters).fetchall())
    except (psycopg.Error, UnicodeError) as error:
        if isinstance(error, psycopg.OperationalError) and (error.diag.sqlstate is None or _is_ended(error)):
            raise
        g.failure = error
        g.failures.append(f"{name} can't be shown: {error}")
        return []


def _as_admin() -> Session:
    session: Session = g.session
    if not session.is_admin:
        abort(403, "Only a member of ulak_admin may do this.")
    return session


def _require_token(action: str, given: Mapping[str, str]) -> None:
    if not g.session.is_token(request.form.get("token", ""), action, given):
        abort(403, "This form is not of this session, or was changed. Go back and load it again.")


def _given(action: actions.Action, form: Mapping[str, str]) -> dict[str, str]:
    return {field.name: value for field in action.fields if (value := form.get(field.name, "").strip())}


def _plain(value: object) -> str:
    """A value of the database, as people read it. Times that come in JSON are text."""
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
