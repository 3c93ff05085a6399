"""Finds options of `panel serve` with which the gate cannot protect the console.

The gate of `panel serve` exists only after the script has run. Routes that an option adds are open before this time,
and other options make the gate useless. A server with such an option shows no console; its error names the option.
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

from gpu_runtime.web.auth import AccessRules

KNOWN_HANDLERS = {
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
OPTION_OF_HANDLER = {
    LivenessHandler: "--liveness",
    FallbackHandler: "--rest-provider",
    AuthenticatedStaticFileHandler: "--static-dirs",
    StaticFileHandler: "--static-dirs",
}
# Options with a secret. Every user of the machine can read a command line, and could forge a login with the secret.
SECRET_OPTIONS = {
    "--cookie-secret": "PANEL_COOKIE_SECRET",
    "--oauth-secret": "PANEL_OAUTH_SECRET",
    "--oauth-encryption-key": "PANEL_OAUTH_ENCRYPTION",
}


def objection(app: Any, rules: AccessRules) -> str:
    """The reason why the Bokeh application `app` must not serve the console under these `rules`.

    The result has one or two sentences. It is empty if `app` may serve the console.
    """
    # sys.argv is not used, because Bokeh replaces it while a script runs.
    return next(_objections(app, rules, sys.orig_argv), "")


def _objections(app: Any, rules: AccessRules, argv: Sequence[str]) -> Iterator[str]:
    for option in _options_with_open_routes(app):
        yield f"{option} opens a route that is not guarded. Start the console without it."
    if len({context.application for context in app.applications.values()}) > 1:
        yield "The console shares its process with no other application. Serve panels/console.py by itself."
    if config.reuse_sessions:
        yield "--reuse-sessions would show one visitor's page to another. Start the console without it."
    if process.task_id() is not None:
        yield "--num-procs would make a console, and a token, for each process. Start the console without it."
    if not isinstance(app.auth_provider, NullAuth):
        yield from _objections_to_login(app, rules, argv)


def _options_with_open_routes(app: Any) -> Iterator[str]:
    if state._admin_context is not None:
        yield "--admin"
    known = KNOWN_HANDLERS | {handler for _, handler in app.auth_provider.endpoints}
    for rule in app.wildcard_router.rules:
        if rule.target not in known:
            yield _option_of(rule.target)


def _option_of(handler: Any) -> str:
    if handler.__module__.startswith("panel.io.rest"):
        return "--rest-provider or --rest-session-info"
    plugin = f"--plugins ({handler.__module__}.{handler.__qualname__})"
    return OPTION_OF_HANDLER.get(handler, plugin)


def _objections_to_login(app: Any, rules: AccessRules, argv: Sequence[str]) -> Iterator[str]:
    if not isinstance(app.auth_provider, BasicAuthProvider):
        yield (
            "--auth-module tells no names, so nobody can be given a role. "
            "Use --basic-auth FILE or --oauth-provider."
        )
    for option, variable in SECRET_OPTIONS.items():
        if any(word == option or word.startswith(f"{option}=") for word in argv):
            yield f"{option} on a command line can be read by every user of this machine. Set {variable} instead."
    password = "" if isinstance(app.auth_provider, OAuthProvider) else config.basic_auth
    if password and not isinstance(password, dict) and not os.path.isfile(password):
        yield (
            "--basic-auth with one password for all proves nobody's name. Give it a file of names and passwords: "
            '{"ann": "…", "bob": "…"}, mode 0600.'
        )
    if not rules.operators and not rules.viewers:
        yield "Nobody has a role. Set GPU_CONSOLE_OPERATORS, GPU_CONSOLE_VIEWERS or both to names, such as ann,bob."
