"""Many HTTP exchanges at once over libcurl's multi interface, in one thread, without blocking."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pycurl

from ulak.messages import bulkhead
from ulak.safety import files
from ulak.safety.address import Guard
from ulak.sessions.signals import BACKEND_SIGNALS
from ulak.transports.http.model import ConfigError, Finished, Profile, Request, is_tls
from ulak.transports.transport import READABLE, WRITABLE, Descriptors, Ready

# An answer is read to its end, so that the connection can be reused, but not beyond this many bytes or keep_body.
_READ_AT_LEAST = 65536
# Memory for the headers of an answer, including interim answers and trailers. Python and libcurl each keep a copy of a
# line, with a record of 117 bytes even for an empty line.
_HEADERS_AT_MOST = 65536
_HEADER_RECORD = 128

# From this size on libcurl would wait a second for "100 Continue", which few receivers send.
_EXPECT_FROM = 1024 * 1024

# pycurl has no name for it. QUICK_EXIT: a request that times out during name resolution doesn't wait for the
# resolver's thread, which can't be stopped and may take half a minute.
_QUICK_EXIT = 322

_WANTED = {pycurl.POLL_IN: READABLE, pycurl.POLL_OUT: WRITABLE, pycurl.POLL_INOUT: READABLE | WRITABLE}
# By epoll's events, of which EPOLLERR is 8 and EPOLLHUP 16.
_READY = tuple(
    (pycurl.CSELECT_IN if events & (READABLE | 16) else 0)
    | (pycurl.CSELECT_OUT if events & WRITABLE else 0)
    | (pycurl.CSELECT_ERR if events & 8 else 0)
    for events in range(32)
)

# Where distributions keep the authorities in one file: Debian, Fedora, SUSE, Alpine.
_SYSTEM_AUTHORITIES = next(
    filter(
        os.path.exists,
        (
            "/etc/ssl/certs/ca-certificates.crt",
            "/etc/pki/tls/certs/ca-bundle.crt",
            "/etc/ssl/ca-bundle.pem",
            "/etc/ssl/cert.pem",
        ),
    ),
    None,
)

_STATUS = pycurl.RESPONSE_CODE

# Errors of a connection that the receiver has closed.
_CLOSED = frozenset((pycurl.E_SEND_ERROR, pycurl.E_RECV_ERROR, pycurl.E_GOT_NOTHING))

_KINDS = {
    pycurl.E_OPERATION_TIMEDOUT: "timeout",
    pycurl.E_COULDNT_RESOLVE_HOST: "resolve",
    pycurl.E_COULDNT_RESOLVE_PROXY: "resolve",
    pycurl.E_COULDNT_CONNECT: "connect",
    pycurl.E_SSL_CONNECT_ERROR: "tls",
    pycurl.E_PEER_FAILED_VERIFICATION: "tls",
    pycurl.E_SSL_ISSUER_ERROR: "tls",
    pycurl.E_SSL_PINNEDPUBKEYNOTMATCH: "tls",
    pycurl.E_SSL_CACERT_BADFILE: "config",
    pycurl.E_SSL_CERTPROBLEM: "config",
}
# GnuTLS reports it only as text.
_FILE_ERROR = "error reading X.509"


def _files(profile: Profile) -> Iterator[tuple[str, bytes]]:
    """The files that libcurl will read, and what each must contain."""
    if is_tls(profile.url):
        if profile.ssl_verify and profile.tls_ca_bundle is not None:
            yield profile.tls_ca_bundle, files.CERTIFICATE
        if profile.tls_client_cert is not None:
            yield profile.tls_client_cert, files.CERTIFICATE
        if profile.tls_client_key is not None:
            yield profile.tls_client_key, files.PRIVATE_KEY
        # With this prefix it is a hash, not a file.
        if profile.tls_pinned_public_key is not None and not profile.tls_pinned_public_key.startswith("sha256//"):
            yield profile.tls_pinned_public_key, files.PUBLIC_KEY
    proxy = profile.proxy
    if proxy is not None and proxy.ssl_verify and proxy.ca_bundle is not None:
        yield proxy.ca_bundle, files.CERTIFICATE


class _Handle:
    """An easy handle, what it is prepared for, and what has arrived so far."""

    profile: Profile
    request: Request

    def __init__(self, guard: Guard, on_new_socket: Callable[[], None]) -> None:
        self.curl = pycurl.Curl()
        self.guard = guard
        self.on_new_socket = on_new_socket
        self.headers: list[bytes] = []
        self.header_room = _HEADERS_AT_MOST
        self.files: tuple[files.Checked, ...] = ()
        self.body = bytearray()
        self.size = 0
        self.read_limit = 0
        self.dialled = False
        self.blocked: str | None = None
        self.no_socket: str | None = None
        self.sent_again = False

    def open_socket(self, purpose: int, address: Any) -> Any:
        """Judges the address that libcurl is about to dial. After SOCKET_BAD it tries the next address of the name."""
        family, kind, protocol, where = address
        if family in (socket.AF_INET, socket.AF_INET6):
            refusal = self.guard.refusal(where[0])
        else:
            refusal = f"address {where[0]} is blocked (not an IP address)"
        if refusal is not None:
            self.blocked = refusal
            return pycurl.SOCKET_BAD
        try:
            opened = socket.socket(family, kind, protocol)
        except OSError as error:
            # This isn't a refusal: a retry may succeed.
            self.no_socket = f"no socket for {where[0]}: {error.strerror}"
            return pycurl.SOCKET_BAD
        self.dialled = True
        self.on_new_socket()
        return opened

    def take_header(self, line: bytes) -> int | None:
        self.header_room -= len(line) + _HEADER_RECORD
        if self.header_room < 0:
            return 0
        self.headers.append(line)
        return None

    def write(self, chunk: bytes) -> int | None:
        room = self.profile.keep_body - len(self.body)
        if room > 0:
            self.body += chunk[:room]
        self.size += len(chunk)
        # Returning another number than was given makes libcurl stop reading and close the connection.
        return 0 if self.size > self.read_limit else None

    def check_hosts(self, profile: Profile) -> None:
        """Raises ConfigError."""
        for each in profile.hosts:
            if refusal := self.guard.host_refusal(each):
                raise ConfigError(refusal)

    def switch(self, profile: Profile) -> None:
        """Reuses the handle for another receiver of the same shape."""
        if profile.hosts != self.profile.hosts:
            self.check_hosts(profile)
        self.profile = profile
        self.curl.setopt(pycurl.URL, profile.url)

    def prepare(self, profile: Profile) -> None:
        """Sets everything that stays the same from message to message."""
        self.check_hosts(profile)
        self.files = files.check(_files(profile))
        self.curl.reset()
        setopt = self.curl.setopt
        self.profile = profile
        self.read_limit = max(_READ_AT_LEAST, profile.keep_body)
        setopt(pycurl.URL, profile.url)
        setopt(pycurl.POST, 1)
        if profile.method != "POST":
            setopt(pycurl.CUSTOMREQUEST, profile.method)
        setopt(pycurl.NOSIGNAL, 1)
        setopt(_QUICK_EXIT, 1)
        setopt(pycurl.PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS)
        setopt(pycurl.FOLLOWLOCATION, 0)
        setopt(pycurl.PATH_AS_IS, 1)
        setopt(pycurl.HTTP_CONTENT_DECODING, 0)
        # By default, pycurl lists every library that it was built with.
        setopt(pycurl.USERAGENT, "")
        setopt(pycurl.TIMEOUT_MS, int(profile.timeout * 1000))
        setopt(pycurl.CONNECTTIMEOUT_MS, int(profile.connect_timeout * 1000))
        setopt(pycurl.OPENSOCKETFUNCTION, self.open_socket)
        setopt(pycurl.WRITEFUNCTION, self.write)
        setopt(pycurl.HEADERFUNCTION, self.take_header)
        self._prepare_tls(profile)
        self._prepare_proxy(profile)

    def _prepare_tls(self, profile: Profile) -> None:
        if not is_tls(profile.url):
            return
        setopt = self.curl.setopt
        setopt(pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_2TLS)
        # Waits for a connection that is being opened, in case it speaks HTTP/2, instead of opening one per request.
        setopt(pycurl.PIPEWAIT, 1)
        setopt(pycurl.SSL_VERIFYPEER, int(profile.ssl_verify))
        setopt(pycurl.SSL_VERIFYHOST, 2 if profile.ssl_verify else 0)
        self._trust(profile.ssl_verify, profile.tls_ca_bundle, pycurl.CAINFO, pycurl.CAPATH)
        for option, value in (
            (pycurl.SSLCERT, profile.tls_client_cert),
            (pycurl.SSLKEY, profile.tls_client_key),
            (pycurl.PINNEDPUBLICKEY, profile.tls_pinned_public_key),
        ):
            if value is not None:
                setopt(option, value)

    def _trust(self, verify: bool, bundle: str | None, file_option: int, folder_option: int) -> None:
        """Uses one file of authorities and never the system's folder: GnuTLS would read the folder for each connection
        (30 ms; a file takes 1 ms), and trust it in addition to the config's file."""
        file = bundle or _SYSTEM_AUTHORITIES
        if file is None and verify:
            return
        self.curl.unsetopt(folder_option)
        if file is not None and verify:
            self.curl.setopt(file_option, file)
        else:
            self.curl.unsetopt(file_option)

    def _prepare_proxy(self, profile: Profile) -> None:
        setopt = self.curl.setopt
        proxy = profile.proxy
        # Empty, not unset: unset would read the environment.
        setopt(pycurl.PROXY, proxy.url if proxy else "")
        setopt(pycurl.NOPROXY, (proxy and proxy.no_proxy) or "")
        if proxy is None:
            return
        if proxy.username is not None:
            setopt(pycurl.PROXYUSERNAME, proxy.username)
            setopt(pycurl.PROXYPASSWORD, proxy.password or "")
        setopt(pycurl.PROXY_SSL_VERIFYPEER, int(proxy.ssl_verify))
        setopt(pycurl.PROXY_SSL_VERIFYHOST, 2 if proxy.ssl_verify else 0)
        self._trust(proxy.ssl_verify, proxy.ca_bundle, pycurl.PROXY_CAINFO, pycurl.PROXY_CAPATH)

    def send_again(self, code: int) -> bool:
        """Whether to send the request once more over a new connection, since a reused one was closed before any answer.

        libcurl does so too, but counts over the whole life of a handle: every sixth time it gives up.
        """
        if code not in _CLOSED or self.sent_again or self.dialled or self.headers or self.size:
            return False
        left = self.profile.timeout - self.curl.getinfo(pycurl.TOTAL_TIME)
        if left <= 0:
            return False
        self.sent_again = True
        self.curl.setopt(pycurl.FRESH_CONNECT, 1)
        self.curl.setopt(pycurl.TIMEOUT_MS, max(1, int(left * 1000)))
        return True

    def finish(self, status: int) -> Finished:
        """The result of the exchange; the handle is ready for the next request."""
        request = self.request
        profile = request.profile
        if status in (429, 503) or profile.capture_response:
            result = Finished(
                request,
                status,
                headers=tuple(self.headers),
                body=bytes(self.body),
                truncated=self.size > profile.keep_body,
                seconds=self.curl.getinfo(pycurl.TOTAL_TIME),
                first_byte_seconds=self.curl.getinfo(pycurl.STARTTRANSFER_TIME),
            )
        else:
            result = Finished(request, status, body=bytes(self.body)) if self.size else Finished(request, status)
        self.headers.clear()
        self.header_room = _HEADERS_AT_MOST
        self.dialled = False
        self.blocked = None
        self.no_socket = None
        if self.size:
            self.body = bytearray()
            self.size = 0
        if self.sent_again:
            self.sent_again = False
            self.curl.setopt(pycurl.FRESH_CONNECT, 0)
            self.curl.setopt(pycurl.TIMEOUT_MS, int(profile.timeout * 1000))
        return result

    def fail(self, code: int, text: str) -> Finished:
        too_long = code == pycurl.E_WRITE_ERROR and self.size > self.read_limit
        kind = None if too_long else _KINDS.get(code, "network")
        if self.header_room < 0:
            text = "the answer's headers are too long"
        elif kind == "config" or text.startswith(_FILE_ERROR):
            kind, text = "config", files.PROBLEM
        elif code == pycurl.E_SSL_CONNECT_ERROR:
            text = f"no handshake: {text}"
        if kind == "connect" and not self.dialled:
            if self.no_socket:
                text = self.no_socket
            elif self.blocked:
                kind, text = "blocked", self.blocked
        # A request that was sent again had only the remaining time.
        seconds = self.profile.timeout if self.sent_again else self.curl.getinfo(pycurl.TOTAL_TIME)
        result = self.finish(self.curl.getinfo(pycurl.RESPONSE_CODE))
        return result._replace(kind=kind, error=None if too_long else text or self.curl.errstr(), seconds=seconds)


class Client:
    """start() any number of requests, then advance() until each has come back as exactly one Finished.

    The caller bounds what is in flight: libcurl's timeout also runs while a request waits for a connection.
    """

    def __init__(self, guard: Guard, descriptors: Descriptors, max_connections: int = 256) -> None:
        self.in_flight = 0
        self._guard = guard
        self._descriptors = descriptors
        self._max_handles = max_connections
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, bulkhead.contained(self._watch, None))
        # By default, libcurl keeps four per request in flight, which would close idle connections under light traffic.
        self._multi.setopt(pycurl.M_MAXCONNECTS, max_connections)
        # What epoll watches. A socket stays registered between two exchanges: removing and adding it would cost two
        # system calls per message.
        self._watched: dict[int, int] = {}
        self._wanted: set[int] = set()
        self._handles: dict[Any, _Handle] = {}
        # By the shape of the profile.
        self._idle: dict[str, list[_Handle]] = {}
        self._never_started: list[Finished] = []
        self._named_in_flight = 0

    def start(self, request: Request) -> None:
        """A request that can't be made doesn't raise: advance() returns it as a failure of kind config."""
        handle: _Handle | None = None
        profile = request.profile
        try:
            handles = self._idle.get(profile.shape)
            handle = handles.pop() if handles else self._prepared(profile)
            if handle.files and any(each.has_changed() for each in handle.files):
                handle.prepare(profile)
            elif handle.profile is not profile:
                handle.switch(profile)
            handle.request = request
            curl = handle.curl
            headers = request.headers
            if len(request.body) >= _EXPECT_FROM:
                headers = [*headers, "expect:"]
            curl.setopt(pycurl.HTTPHEADER, headers)
            curl.setopt(pycurl.POSTFIELDS, request.body)
            self._multi.add_handle(curl)
        except Exception as error:
            if handle is not None:
                self._drop(handle)
            # The text of any other error might quote what caused it.
            told = str(error) if isinstance(error, pycurl.error) else bulkhead.kind(error)
            told = str(error) if isinstance(error, ConfigError) else f"the request can't be made: {told}"
            self._never_started.append(Finished(request, 0, "config", told))
            return
        self.in_flight += 1
        self._named_in_flight += profile.is_named

    def timeout(self) -> float | None:
        """As transports.transport.Transport has it."""
        if self._never_started:
            return 0.0
        if not self.in_flight:
            return None
        # Asked once per step: libcurl's timer callback would run for each request that starts or ends.
        left = self._multi.timeout()
        return left / 1000 if left >= 0 else None

    def advance(self, ready: Ready) -> list[Finished]:
        """The exchanges that ended. `ready` lists sockets with their events; empty: a time-out has passed."""
        finished, self._never_started = self._never_started, []
        if not self._named_in_flight:
            self._advance(ready, finished)
            return finished
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, BACKEND_SIGNALS)
        try:
            self._advance(ready, finished)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return finished

    def close(self) -> None:
        """Drops what is in flight and closes every connection."""
        for handle in self._handles.values():
            handle.curl.close()
        self._handles.clear()
        self._idle.clear()
        self._multi.close()

    def _advance(self, ready: Ready, finished: list[Finished]) -> None:
        act = self._multi.socket_action
        if not ready:
            act(pycurl.SOCKET_TIMEOUT, 0)
        for descriptor, events in ready:
            if descriptor in self._wanted:
                act(descriptor, _READY[events & 31])
            else:
                # The receiver closed an idle connection, or libcurl waited last until it can be written to (8.14 does
                # if the answer comes at once). epoll would report it again and again.
                self._watched.pop(descriptor, None)
                self._descriptors.forget(descriptor)
        self._collect(finished)

    def _collect(self, finished: list[Finished]) -> None:
        more = 1
        while more:
            more, done, failed = self._multi.info_read(256)
            for curl in done:
                handle = self._handles[curl]
                try:
                    self._release(handle)
                    finished.append(handle.finish(curl.getinfo(_STATUS)))
                except Exception as error:
                    finished.append(self._break_off(handle, error))
            for curl, code, text in failed:
                handle = self._handles[curl]
                try:
                    if handle.send_again(code):
                        self._multi.remove_handle(curl)
                        self._multi.add_handle(curl)
                        continue
                    self._release(handle)
                    finished.append(handle.fail(code, text))
                except Exception as error:
                    finished.append(self._break_off(handle, error))

    def _break_off(self, handle: _Handle, error: Exception) -> Finished:
        """An exception while reading one answer must not stop the other exchanges."""
        if handle not in self._idle.get(handle.profile.shape, ()):
            self._release(handle)
        self._idle[handle.profile.shape].remove(handle)
        self._drop(handle)
        return Finished(handle.request, 0, "network", f"the answer can't be read: {bulkhead.kind(error)}")

    def _release(self, handle: _Handle) -> None:
        self._multi.remove_handle(handle.curl)
        self.in_flight -= 1
        self._named_in_flight -= handle.profile.is_named
        self._idle.setdefault(handle.profile.shape, []).append(handle)

    def _prepared(self, profile: Profile) -> _Handle:
        """For a shape without an idle handle: a new handle, or an idle one of another shape."""
        handle = self._reusable() if len(self._handles) >= self._max_handles else None
        if handle is None:
            # A new socket may get the number of one that was closed unnoticed, so forget what was known by number.
            handle = _Handle(self._guard, on_new_socket=self._watched.clear)
        try:
            handle.prepare(profile)
        except Exception:
            self._drop(handle)
            raise
        self._handles[handle.curl] = handle
        return handle

    def _drop(self, handle: _Handle) -> None:
        self._handles.pop(handle.curl, None)
        handle.curl.close()

    def _reusable(self) -> _Handle | None:
        for shape, handles in list(self._idle.items()):
            if handles:
                return handles.pop()
            del self._idle[shape]
        return None

    def _watch(self, event: int, fd: int, multi: object, data: object) -> None:
        """Called by libcurl: which events of a socket it waits for now."""
        if event == pycurl.POLL_REMOVE:
            self._wanted.discard(fd)
            return
        self._wanted.add(fd)
        events = _WANTED[event]
        if self._watched.get(fd) != events:
            self._descriptors.watch(fd, events)
            self._watched[fd] = events
