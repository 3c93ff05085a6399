"""How a server was started that the gate cannot make good: options that open a way around it, or make it worthless.

The gate of `panel serve` stands only once the script runs; what another option opens was open before. So such a server
shows no console, and says which option to leave out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from bokeh.server.auth_provider import NullAuth
from bokeh.server.views.ico_handler import IcoHandler
from bokeh.server.views.metadata_handler import MetadataHandler
from bokeh.server.views.multi_root_static_handler import MultiRootStaticHandler
from bokeh.server.views.static_handler import StaticHandler
from panel.auth import BasicAuthProvider, OAuthProvider
from panel.config import config
from panel.io.liveness import LivenessHandler
from panel.io.server import (
    AuthenticatedStaticFileHandler,
    AutoloadJsHandler,
    ComponentResourceHandler,
    DocHandler,
    RootHandler,
    WSHandler,
)
from panel.io.state import state
from tornado import process
from tornado.web import FallbackHandler, StaticFileHandler

from .auth import Terms

KNOWN = {
    DocHandler,
    WSHandler,
    AutoloadJsHandler,
    MetadataHandler,
    RootHandler,
    StaticHandler,
    MultiRootStaticHandler,
    IcoHandler,
    ComponentResourceHandler,
}
OPENED_BY = {
    LivenessHandler: "--liveness",
    FallbackHandler: "--rest-provider",
    AuthenticatedStaticFileHandler: "--static-dirs",
    StaticFileHandler: "--static-dirs",
}
# What stands on a command line every user of the box can read; with one of these they could forge a login.
SECRETS = {
    "--cookie-secret": "PANEL_COOKIE_SECRET",
    "--oauth-secret": "PANEL_OAUTH_SECRET",
    "--oauth-encryption-key": "PANEL_OAUTH_ENCRYPTION",
}


def objection(app: Any, terms: Terms) -> str:
    """Why no console is served by a server that was started so, as one sentence; empty where nothing is wrong."""
    return next(
        _objections(app, terms, sys.orig_argv), ""
    )  # Bokeh puts others in sys.argv while a script runs


def _objections(app: Any, terms: Terms, argv: Sequence[str]) -> Iterator[str]:
    for flag in _opened(app):
        yield f"{flag} opens a route that is not guarded. Start the console without it."
    if len({context.application for context in app.applications.values()}) > 1:
        yield "The console shares its process with no other application. Serve panels/console.py by itself."
    if config.reuse_sessions:
        yield "--reuse-sessions would show one visitor's page to another. Start the console without it."
    if process.task_id() is not None:
        yield "--num-procs would make a console, and a token, for each process. Start the console without it."
    if not isinstance(app.auth_provider, NullAuth):
        yield from _of_the_login(app, terms, argv)


def _opened(app: Any) -> Iterator[str]:
    if state._admin_context is not None:
        yield "--admin"
    endpoints = {handler for _, handler in app.auth_provider.endpoints}
    for rule in app.wildcard_router.rules:
        if rule.target not in KNOWN | endpoints:
            yield _flag(rule.target)


def _flag(handler: Any) -> str:
    if handler.__module__.startswith("panel.io.rest"):
        return "--rest-provider or --rest-session-info"
    return OPENED_BY.get(handler, f"--plugins ({handler.__module__}.{handler.__qualname__})")


def _of_the_login(app: Any, terms: Terms, argv: Sequence[str]) -> Iterator[str]:
    if not isinstance(app.auth_provider, BasicAuthProvider):
        yield "--auth-module tells no names that could be given a role. Use --basic-auth FILE or --oauth-provider."
    for flag, variable in SECRETS.items():
        if any(word == flag or word.startswith(f"{flag}=") for word in argv):
            yield f"{flag} on a command line can be read by every user of this machine. Set {variable} instead."
    given = "" if isinstance(app.auth_provider, OAuthProvider) else config.basic_auth
    if given and not isinstance(given, dict) and not os.path.isfile(given):
        yield (
            "--basic-auth with one password for all proves nobody's name. Give it a file of names and passwords: "
            '{"ann": "…", "bob": "…"}, mode 0600.'
        )
    if not terms.operators and not terms.viewers:
        yield "Nobody has a role. Set GPU_CONSOLE_OPERATORS, GPU_CONSOLE_VIEWERS or both to names, such as ann,bob."
