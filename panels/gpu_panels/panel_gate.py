"""The gate of a server that Panel runs, and the options of `panel serve` with which it cannot protect the console.

This module adds the parts that depend on Panel: its login with names, its URL prefix, and the owners of its websockets.
The rules for every server are in `gpu_runtime.web.gate`.

The gate of `panel serve` exists only after the script has run. Routes that an option adds are open before this time,
and other options make the gate useless. A server with such an option shows no console; its error names the option.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import panel as pn
from bokeh.server.auth_provider import NullAuth
from bokeh.server.views.ico_handler import IcoHandler
from bokeh.server.views.metadata_handler import MetadataHandler
from bokeh.server.views.multi_root_static_handler import MultiRootStaticHandler
from bokeh.server.views.static_handler import StaticHandler
from bokeh.settings import settings
from bokeh.util.token import get_session_id
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
from tornado.httputil import HTTPServerRequest
from tornado.web import FallbackHandler, StaticFileHandler, decode_signed_value

from gpu_runtime.errors import NotAllowed
from gpu_runtime.web import auth, login
from gpu_runtime.web.auth import AccessRules, Visitor
from gpu_runtime.web.gate import Credentials, Gate


def visitor() -> Visitor:
    """The visitor of the page that Panel is making. Raises NotAllowed if the gate did not admit the request."""
    context = getattr(pn.state.curdoc, "session_context", None)
    found = getattr(getattr(context, "request", None), "visitor", None)
    if not isinstance(found, Visitor):
        raise NotAllowed(
            "the console needs the token of its URL, and this request was not admitted",
            verb="console",
        )
    return found


class PanelGate(Gate):
    """The gate in front of one Bokeh application. With Panel's own login, the name decides the role, not a token."""

    def __init__(self, app: Any, rules: AccessRules) -> None:
        super().__init__(app, rules)
        self.prefix = app.prefix
        self.home = next(iter(app.applications))

    @property
    def login(self) -> bool:
        """Whether Panel's own options ask visitors for a name and a password."""
        return not isinstance(self._app.auth_provider, NullAuth)

    @property
    def keeps_cookies(self) -> bool:  # type: ignore[override]
        """Whether cookies stay in the request. This is needed for Panel's login, which reads its own cookies."""
        return self.login

    def cookie_base(self) -> str:
        """The path that Panel's option sets for cookies. If the option is not set, the URL prefix."""
        return (config.cookie_path or "/").rstrip("/") or self.prefix

    def allowed_origins(self) -> set[str]:
        """The hosts of `--allow-websocket-origin` and of Bokeh's setting of that name."""
        return {*self._app.websocket_origins, *(settings.allowed_ws_origin() or ())}

    def may_join(self, request: HTTPServerRequest, visitor: Visitor) -> bool:
        """Whether the session that `request` names was made for this `visitor`, whose rights a page in it has."""
        words = request.headers.get("Sec-WebSocket-Protocol", "").split(",")
        if len(words) != 2:
            return True  # Bokeh refuses such a request itself
        try:
            session = get_session_id(words[1].strip())
        except Exception:  # it is not Bokeh's token; several types of exceptions mean that
            return False
        return all(owner == visitor for owner in self._owners_of(session))

    def _owners_of(self, session_id: str) -> Iterator[Visitor | None]:
        for context in self._app.applications.values():
            for session in context.sessions:
                if session.id == session_id:
                    request = getattr(session.document.session_context, "request", None)
                    yield getattr(request, "visitor", None)

    def _admit(self, request: HTTPServerRequest, credentials: Credentials) -> Any:
        if self.login:
            return self._admit_by_name(request, credentials)
        return super()._admit(request, credentials)

    def _admit_by_name(self, request: HTTPServerRequest, credentials: Credentials) -> Any:
        """Admits a visitor whose proved name has a role. All others get only the login page."""
        name = self._name(credentials.cookies)
        role = auth.role_of_name(name, self.rules)
        if role is not None:
            return self._let_in(request, self.rules.visitor(role, name))
        handler = self._route(request)
        if self._is_login(handler.handler_class):
            if request.method == "POST" and not self._may_try_password(request):
                return self._refuse(request, 429, login.TOO_MANY_GUESSES)
            return handler
        if name:
            return self._refuse(
                request,
                403,
                f"{name} has logged in, and has no role here. The user who runs the server "
                "gives one with GPU_CONSOLE_OPERATORS or GPU_CONSOLE_VIEWERS.",
            )
        if issubclass(handler.handler_class, (DocHandler, RootHandler)):
            return handler  # redirects to the login, since nobody is logged in
        return self._refuse(request, 403, "Log in first.")

    def _name(self, cookies: dict[str, str]) -> str:
        """The name in the cookie that Panel's login signed, or ""."""
        value = decode_signed_value(
            self._app.settings.get("cookie_secret") or secrets.token_hex(),
            "user",
            cookies.get("user"),
            max_age_days=config.oauth_expiry,
        )
        return value.decode("utf-8", "replace") if value else ""

    def _is_login(self, handler: type) -> bool:
        return any(issubclass(handler, known) for _, known in self._app.auth_provider.endpoints)

    def _may_try_password(self, request: HTTPServerRequest) -> bool:
        """Whether Panel may check a password for the stranger who sent `request` now.

        Panel checks passwords itself, so the gate does not know which passwords are right. Therefore every try counts
        as a guess.
        """
        limiter = self.guesses.of(self._stranger(request))
        if limiter.wait_seconds() != 0.0:
            return False
        limiter.count()
        return True


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
    """Why the Bokeh application `app` must not serve the console under these `rules`; empty if it may."""
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
