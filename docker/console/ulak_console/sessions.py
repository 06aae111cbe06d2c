"""Sessions of the console. Each is a connection to the database, opened with the role and password of the login form,
so the database decides what it may do. The password isn't kept; the browser gets a random name of the session."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.rows import DictRow, dict_row

IDLE_MINUTES = 30
LONGEST_HOURS = 12
MOST_SESSIONS = 64
# Wrong passwords a minute, from all visitors together; after that, nobody can log in for a moment.
MOST_FAILURES = 10

# Only a confirmed action writes, and no search_path of a role or database reaches our queries.
# The server itself ends a session that nobody uses.
OPTIONS = " ".join(
    (
        "-c search_path=pg_catalog,pg_temp",
        "-c default_transaction_read_only=on",
        "-c timezone=UTC",
        "-c statement_timeout=60s",
        "-c lock_timeout=10s",
        f"-c idle_session_timeout={IDLE_MINUTES}min",
    )
)

WHO = """
    select
        session_user as name,
        pg_catalog.current_database() as database,
        r.rolsuper as is_superuser,
        e.extname is not null as has_ulak,
        pg_catalog.pg_has_role(session_user, 'ulak_monitor', 'usage') as is_monitor,
        pg_catalog.pg_has_role(session_user, 'ulak_admin', 'usage') as is_admin
    from pg_catalog.pg_roles r
    left join pg_catalog.pg_extension e on e.extname = 'ulak'
    where r.rolname = session_user
"""


class LoginRefused(Exception):
    pass


class Session:
    def __init__(self, connection: psycopg.Connection[DictRow], who: Mapping[str, Any], now: float) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._key = secrets.token_bytes(32)
        self.name: str = who["name"]
        self.database: str = who["database"]
        self.is_admin: bool = who["is_admin"]
        self.began = now
        self.used = now
        # What the last action has done, to be told on the next page.
        self.told: str | None = None

    @contextmanager
    def reading(self) -> Iterator[psycopg.Cursor[DictRow]]:
        with self._lock, self._connection.transaction(), self._connection.cursor() as cursor:
            yield cursor

    @contextmanager
    def writing(self) -> Iterator[psycopg.Cursor[DictRow]]:
        with self.reading() as cursor:
            cursor.execute("set transaction read write")
            yield cursor

    def form_token(self, action: str, parameters: Mapping[str, str]) -> str:
        """Of one form: it confirms this action with these parameters, in this session, and nothing else."""
        return _sign(self._key, json.dumps([action, sorted(parameters.items())]))

    def is_token(self, given: str, action: str, parameters: Mapping[str, str]) -> bool:
        return hmac.compare_digest(given.encode(), self.form_token(action, parameters).encode())

    def close(self) -> None:
        self._connection.close()


class Sessions:
    def __init__(self, conninfo: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._conninfo = conninfo
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._failures: deque[float] = deque(maxlen=MOST_FAILURES)
        self._key = secrets.token_bytes(32)

    def login(self, name: str, password: str) -> str:
        """The new session's secret name."""
        now = self._clock()
        with self._lock:
            if len(self._failures) == MOST_FAILURES and now - self._failures[0] < 60:
                raise LoginRefused("too many wrong passwords: wait a minute")
        try:
            session = self._open(name, password, now)
        except LoginRefused:
            with self._lock:
                self._failures.append(now)
            raise
        self._remove_old(now)
        with self._lock:
            if len(self._sessions) >= MOST_SESSIONS:
                session.close()
                raise LoginRefused("too many sessions are open")
            secret = secrets.token_urlsafe(32)
            self._sessions[secret] = session
        return secret

    def _open(self, name: str, password: str, now: float) -> Session:
        if not name or not password or "\0" in name + password:
            raise LoginRefused("enter a role and its password")
        try:
            connection: psycopg.Connection[DictRow] = psycopg.connect(
                self._conninfo,
                user=name,
                password=password,
                options=OPTIONS,
                application_name="ulak console",
                # A database in SQL_ASCII would give us bytes.
                client_encoding="UTF8",
                connect_timeout=10,
                autocommit=True,
                row_factory=dict_row,
            )
        except psycopg.OperationalError as error:
            # The answer doesn't say whether the role or the password is wrong; it does say that the server is down.
            if "authentication failed" in str(error) or "no pg_hba.conf entry" in str(error):
                raise LoginRefused("role or password is wrong") from None
            raise LoginRefused("the database cannot be reached, or refuses this role") from None
        try:
            return Session(connection, self._checked(connection), now)
        except BaseException:
            connection.close()
            raise

    def _checked(self, connection: psycopg.Connection[DictRow]) -> DictRow:
        # Where pg_hba.conf trusts, any password would do.
        if not connection.pgconn.used_password:
            raise LoginRefused("the server did not ask for a password: let pg_hba.conf demand one (scram-sha-256)")
        try:
            who = connection.execute(WHO).fetchone()
        except psycopg.errors.UndefinedObject:
            who = None
        if who is None or not who["has_ulak"]:
            raise LoginRefused("ulak is not installed in this database")
        if who["is_superuser"]:
            raise LoginRefused("superusers can't log in here: use a member of ulak_monitor or ulak_admin")
        if not who["is_monitor"] and not who["is_admin"]:
            raise LoginRefused("this role is not a member of ulak_monitor or ulak_admin")
        return who

    def find(self, secret: str | None) -> Session | None:
        now = self._clock()
        self._remove_old(now)
        with self._lock:
            session = self._sessions.get(secret) if secret else None
            if session is not None:
                session.used = now
            return session

    def end(self, secret: str | None) -> None:
        with self._lock:
            session = self._sessions.pop(secret, None) if secret else None
        if session is not None:
            session.close()

    def _remove_old(self, now: float) -> None:
        with self._lock:
            old = [
                secret
                for secret, session in self._sessions.items()
                if now - session.used > IDLE_MINUTES * 60 or now - session.began > LONGEST_HOURS * 3600
            ]
            ended = [self._sessions.pop(secret) for secret in old]
        for session in ended:
            session.close()

    def login_token(self, cookie: str) -> str:
        """Of the login form: there is no session yet, so it goes with a cookie of its own."""
        return _sign(self._key, cookie)

    def is_login_token(self, given: str, cookie: str) -> bool:
        return bool(cookie) and hmac.compare_digest(given.encode(), self.login_token(cookie).encode())


def _sign(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
