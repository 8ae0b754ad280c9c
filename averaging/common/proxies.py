"""The proxy through which this process calls others. Only `AVERAGING_PROXY` or the option asks for one.

Variables such as HTTPS_PROXY are set on many machines for web browsing, and their proxies let no calls between peers
through. So they are not used, and errors and the log say so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from averaging.common.addresses import is_loopback
from averaging.errors import ConfigError

PROXY_VARIABLE = "AVERAGING_PROXY"

IGNORED = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
"""Variables of other programs, in lower or upper case."""


def check_proxy(url: str) -> str:
    """Returns `url`, or raises a ConfigError without the password in it."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme == "http" and bool(parts.hostname) and bool(parts.port) and not parts.path.strip("/")
    except ValueError:
        valid = False
    if not valid or not url.isprintable() or len(url) > 1024:
        scheme, separator, _ = url.rpartition("@")[0].partition("://")
        shown = f"{scheme}{separator}{url.rpartition('@')[2]}"[:100] if separator else url.rpartition("@")[2][:100]
        raise ConfigError(
            f"{shown!r} is not an HTTP proxy; give http://HOST:PORT or http://USER:PASSWORD@HOST:PORT of one that "
            "allows CONNECT"
        )
    return url


def chosen_proxy(proxy: str | None = None, environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns the URL of the proxy that the user has asked for, by the option or else by `AVERAGING_PROXY`, if any."""
    if proxy is not None or not environ.get(PROXY_VARIABLE):
        return proxy
    try:
        return check_proxy(environ[PROXY_VARIABLE])
    except ConfigError as error:
        raise ConfigError(f"{PROXY_VARIABLE}: {error}") from None


def proxy_for(host: str, proxy: str | None) -> str | None:
    """Returns `proxy`, or None for the hosts that are always called directly: loopback, and those in NO_PROXY."""
    if proxy is None or is_loopback(host):
        return None
    from urllib.request import proxy_bypass  # it takes 20 ms to import, and few need it

    return None if proxy_bypass(host.strip("[]")) else proxy


def shown_proxy(proxy: str) -> str:
    return proxy.rpartition("@")[2].removeprefix("http://").rstrip("/")


def ignored_proxies(environ: Mapping[str, str] = os.environ) -> str:
    """A sentence about the proxy variables that are set and not used; empty if there are none, or one was asked for."""
    names = sorted(name for name, value in environ.items() if value and name.lower() in IGNORED)
    if not names or environ.get(PROXY_VARIABLE):
        return ""
    verb = "is" if len(names) == 1 else "are"
    return f"{', '.join(names)} {verb} set and not used; {PROXY_VARIABLE}=http://HOST:PORT would call through a proxy"
