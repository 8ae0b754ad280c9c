"""Who may read the page.

A page of another site runs in a browser that reaches this server. It must not read the run: neither through a name that
its owner lets point here (DNS rebinding), nor with the password that the browser remembers, nor in a frame.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from averaging.common import is_loopback, parse_address, spelled
from averaging.errors import ConfigError, printable
from averaging.http_server import HttpRefusal, carries_secret, host_in, is_name_of_server
from averaging.security import read_tokens

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of every answer: nothing from elsewhere runs in the page, and no other page shows or embeds it."""

LOGIN = {"WWW-Authenticate": 'Basic realm="averaging dashboard", charset="UTF-8"'}


@dataclass(frozen=True, slots=True)
class PageAccess:
    """Who may read the page.

    Attributes:
        hosts: the names of this server in lower case, beside IP addresses and localhost.
        passwords: a request must carry one of them; if empty, none is needed.
        only_here: whether only this machine can connect.
    """

    hosts: tuple[str, ...]
    passwords: tuple[str, ...] = ()
    only_here: bool = True

    @property
    def readers(self) -> str:
        """Who can read the page, as text."""
        who = "users of this machine" if self.only_here else "all who reach this address"
        return f"for {who}{' with the password' if self.passwords else ', without a password'}"

    def refusal(self, headers: Mapping[str, str], path: str) -> HttpRefusal | None:
        """Why a request is refused; None if it is answered.

        Args:
            headers: its headers by name in lower case.
            path: its path.
        """
        host = headers.get("host", "")
        if not is_name_of_server(host_in(host) or "", self.hosts):
            text = (
                f"{host[:100]!r} is no known name of this server; use its address, or start it with --allow-host NAME"
            )
            return HttpRefusal(403, printable(text))
        if _is_of_another_page(headers, host, path):
            return HttpRefusal(403, "requests of pages of other sites are refused")
        if self.passwords and not carries_secret(headers, self.passwords, ("basic",)):
            return HttpRefusal(401, "a password of --password-file is needed, with any user name")
        return None


def _is_of_another_page(headers: Mapping[str, str], host: str, path: str) -> bool:
    """Whether a page of another origin makes the request. It may have a link that leads to this page."""
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        return True
    if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
        return False
    is_link = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
    return not (is_link and path == "/")


def page_access(
    listen: str,
    *,
    hosts: tuple[str, ...] = (),
    password_file: str | Path | None = None,
    https: bool = False,
    insecure: bool = False,
) -> PageAccess:
    """Returns who may read the page, if the user has said so clearly enough.

    Raises:
        ConfigError: other machines could read the page, or the traffic, and the user has not allowed that.
    """
    host, _ = parse_address(listen)
    passwords = read_tokens(password_file, "password_file")
    if not (is_loopback(host) or insecure or (https and passwords)):
        both = f"{spelled('https_cert')} and {spelled('https_key')}"
        missing = [text for text, given in ((both, https), (spelled("password_file"), passwords)) if not given]
        raise ConfigError(
            f"other machines can reach {listen}, and could read the run or the traffic: give {' and '.join(missing)}; "
            f"or {spelled('insecure', True)}, if everybody in that network may; or listen on 127.0.0.1 and let ssh "
            "forward the port (ssh -L 8080:127.0.0.1:8080 this-machine)"
        )
    own = {host.lower(), gethostname().lower(), *(name.lower().rstrip(".") for name in hosts)}
    return PageAccess(tuple(sorted(own)), passwords, is_loopback(host))


def check_https(cert: str | Path | None, key: str | Path | None) -> bool:
    """Whether the page is served with TLS.

    Raises:
        ConfigError: one file is missing, or they are not a certificate and its key in PEM.
    """
    if cert is None and key is None:
        return False
    if cert is None or key is None:
        raise ConfigError(f"{spelled('https_cert')} and {spelled('https_key')} belong together; give both")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")
    except OSError as error:  # such as ssl.SSLError
        why = error.strerror or error
        names = f"{spelled('https_cert', cert)} and {spelled('https_key', key)}"
        raise ConfigError(f"{names} are no certificate with its key: {why}") from None
    return True


class PageGuard:
    """Answers refused requests, and adds `HEADERS` to every answer.

    Args:
        application: answers the others.
        access: decides.
    """

    def __init__(self, application: ASGIApp, access: PageAccess) -> None:
        self._application, self._access = application, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
            await send(message)

        refusal = self._access.refusal(Headers(scope=scope), scope["path"])
        if refusal is None:
            await self._application(scope, receive, send_with_headers)
            return
        more = LOGIN if refusal.status == 401 else {}
        await PlainTextResponse(refusal.text, refusal.status, dict(more))(scope, receive, send_with_headers)
