"""Tells people of problems, by webhooks and by mail: once when a problem begins, and once when it ends.

The destinations are in one file, a line each. `gpu console`, `gpu serve` and `gpu exporter` read it; of a user's
processes on a machine one tells. What was told, acknowledged and silenced is in a state file of this user, so that a
new process tells nothing again. It is on a local disk, since machines with one home have problems of their own. Each
destination has its own thread: one that is slow, dead or refuses delays nobody else.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from email.message import EmailMessage
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from . import access_keys, threads
from .errors import BadDocument, GpuError
from .facts import Problem, ProblemKind, Snapshot, Value, problems
from .files import config_home, local_state, locked, make_directory, replace_file
from .safe_text import printable

log = logging.getLogger("gpu_runtime")

ROUND_SECONDS = 5.0
SETTLE_SECONDS = 15.0  # a problem begins or ends for the destinations after it has for so long
ACKNOWLEDGED_SECONDS = (
    86400.0  # an acknowledgement lasts until its problem ends, at most for so long
)
DELIVERY_SECONDS = 30.0  # the longest time for one message
RETRY_SECONDS, MOST_RETRY_SECONDS = 10.0, 600.0  # between two attempts; it doubles
MOST_DESTINATIONS, MOST_TOLD, MOST_LETTERS = 20, 20, 600
ALL = "all"  # in place of a problem's name: a silence of everything
_ADDRESS = re.compile(r"[A-Za-z0-9._%+][A-Za-z0-9._%+-]*(@[A-Za-z0-9.-]+)?")  # also of a local user


# -- the destinations


class Destination(NamedTuple):
    """Where messages go."""

    address: str  # the URL of a webhook, or a mail address

    @property
    def is_webhook(self) -> bool:
        return "://" in self.address

    @property
    def label(self) -> str:
        """Its name for people, without the path and the query of a URL, which are often a secret."""
        host = urlsplit(self.address).netloc.rpartition("@")[2]
        return f"webhook at {host}" if self.is_webhook else f"mail to {self.address}"

    @property
    def key(self) -> str:
        """Its name in the state file."""
        return hashlib.sha256(self.address.encode()).hexdigest()[:16]


def file_of(setting: str | None) -> Path:
    """The file of destinations, by the value of the setting GPU_ALERTS."""
    return Path(setting) if setting else config_home() / "alerts.txt"


def destinations(path: Path) -> tuple[Destination, ...]:
    """The destinations in the file `path`; none without the file.

    Raises BadDocument if another user may read or replace the file, and for a line with anything else.
    """
    found = []
    text = (access_keys.read_private(path) or b"").decode(errors="replace")
    for number, line in enumerate(text.split("\n"), 1):
        address = line.strip()
        if not address or address.startswith("#"):
            continue
        parts = urlsplit(address)
        is_url = parts.scheme in ("http", "https") and parts.hostname and address.isprintable()
        if not (is_url or _ADDRESS.fullmatch(address)):
            wanted = "one URL of a webhook (https://…) or one mail address a line"
            raise BadDocument(str(path), number, "", f"it has something else than {wanted}")
        found.append(Destination(address))
    if len(found) > MOST_DESTINATIONS:
        raise BadDocument(str(path), 0, "", f"it has more than {MOST_DESTINATIONS} destinations")
    return tuple(dict.fromkeys(found))


# -- what was told, acknowledged and silenced


class Mark(Value):
    """An acknowledgement, or a silence. Times are in epoch seconds."""

    by: str  # the person
    wall: float  # when it was made
    until: float


class State(Value):
    """The content of the state file."""

    acknowledged: dict[str, Mark] = {}  # by the name of the problem
    silenced: dict[str, Mark] = {}  # by the name of a problem, a kind of problems, or ALL
    # Key of a destination -> the names of the problems of whose beginning it knows -> their texts
    told: dict[str, dict[str, str]] = {}
    failures: dict[str, str] = {}  # key of a destination -> why the last message did not arrive

    def silence_of(self, name: str, wall: float) -> Mark | None:
        """The silence that applies to the problem `name` at the time `wall`; None without one."""
        for what in (name, name.rpartition("-")[0], ALL):
            if (mark := self.silenced.get(what)) and mark.until > wall:
                return mark
        return None

    def words(self, name: str, wall: float) -> str:
        """Sentences on who has acknowledged or silenced the problem `name`; empty if nobody has."""
        found, mark = [], self.acknowledged.get(name)
        if mark and mark.until > wall:
            found.append(f"Acknowledged by {mark.by} at {_clock(mark.wall, wall)}.")
        if silence := self.silence_of(name, wall):
            found.append(f"Silenced by {silence.by} until {_clock(silence.until, wall)}.")
        return " ".join(found)


def name_of(problem: Problem) -> str:
    """A short name of the `problem` that can be typed, and stays as long as it lasts: `silent-3f2a`."""
    return f"{problem.kind}-{hashlib.sha256(problem.key.encode()).hexdigest()[:4]}"


def read_state() -> State:
    """The state of this user's alerts. A file that cannot be read counts as empty, and is logged."""
    try:
        return msgspec.json.decode(_state_file().read_bytes(), type=State)
    except FileNotFoundError:
        return State()
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("the state of alerts %s is not used: %s", _state_file(), error)
        return State()


def acknowledge(what: str, by: str, found: Collection[Problem], wall: float) -> str:
    """Marks the problems of `found` that `what` means as known to the person `by`. Returns a sentence.

    `what` is the name or the kind of a problem, or `all`. Raises GpuError if it means none.
    """
    names = [name_of(problem) for problem in found if what in (name_of(problem), problem.kind, ALL)]
    if not names:
        raise _unknown(what, found)
    mark = Mark(printable(by, 80), wall, wall + ACKNOWLEDGED_SECONDS)
    marks = dict.fromkeys(names, mark)
    _change(lambda old: replace(old, acknowledged=_lasting(old.acknowledged, wall) | marks))
    return f"{', '.join(names)}: acknowledged by {mark.by}"


def silence(what: str, by: str, found: Collection[Problem], wall: float, seconds: float) -> str:
    """Nothing is told of `what` for `seconds`: the name of one of `found`, a kind of problems, or `all`.

    Returns a sentence. Raises GpuError for an unknown `what`.
    """
    if what not in (ALL, *ProblemKind, *map(name_of, found)):
        raise _unknown(what, found)
    mark = Mark(printable(by, 80), wall, wall + seconds)
    _change(lambda old: replace(old, silenced=_lasting(old.silenced, wall) | {what: mark}))
    return f"{what}: silenced by {mark.by} until {_clock(mark.until, wall)}"


def end_silence(what: str) -> str:
    """Ends the silence of `what`, as it was made; of `all`, every silence. Returns a sentence. Raises GpuError."""
    silenced = read_state().silenced
    if what not in silenced and not (what == ALL and silenced):
        raise GpuError(f"{what} is not silenced. See the silences:  gpu alerts")
    kept = {} if what == ALL else {name: mark for name, mark in silenced.items() if name != what}
    _change(lambda old: replace(old, silenced=kept))
    return f"{what}: no longer silenced"


def _unknown(what: str, found: Collection[Problem]) -> GpuError:
    known = ", ".join(map(name_of, found)) or "none"
    return GpuError(f"no problem is called {what!r}; now there are: {known}. See them:  gpu alerts")


def _lasting(marks: Mapping[str, Mark], wall: float) -> dict[str, Mark]:
    return {what: mark for what, mark in marks.items() if mark.until > wall}


def _clock(when: float, now: float) -> str:
    far = abs(when - now) > 20 * 3600
    return time.strftime("%a %H:%M" if far else "%H:%M", time.localtime(when))


def _state_file() -> Path:
    return local_state() / "alerts.json"


def _change(change: Callable[[State], State]) -> None:
    """Replaces the state by `change(state)`, while no other process changes it. Raises OSError."""
    make_directory(_state_file().parent)
    with locked(local_state() / "alerts.lock"):
        replace_file(_state_file(), msgspec.json.encode(change(read_state())))


# -- one message


class Message(NamedTuple):
    """What is told: a subject and a text for a mail, and the JSON for a webhook."""

    subject: str
    text: str
    document: dict[str, Any]


def message(
    host: str, begun: Mapping[str, str], ended: Mapping[str, str], state: State, wall: float
) -> Message:
    """The message that the problems `begun` on `host` have begun, and `ended` have ended: their texts by name."""
    events = [("begins", *new) for new in begun.items()] + [("ends", *old) for old in ended.items()]
    lines = [
        f"{what.upper()} {name}: {_shown(text)} {state.words(name, wall)}".rstrip()
        for what, name, text in events[:MOST_TOLD]
    ]
    lines += [f"and {len(events) - MOST_TOLD} more"] if len(events) > MOST_TOLD else []
    for name in [*begun][:1]:
        lines.append(f"If you know of it:  gpu alerts ack {name}")
        lines.append(f"To hear no more of it:  gpu alerts silence {name} --for 2h")
    what, _, first = events[0]
    several = f"{len(begun)} problems begin, {len(ended)} end"
    subject = printable(f"{host}: {several if events[1:] else f'{what}: {_shown(first)}'}", 150)
    text = "\n".join([f"gpu-console on {host}", *lines])
    alerts = [
        {"state": what, "name": name, "kind": name.rpartition("-")[0], "text": text}
        for what, name, text in events[:MOST_TOLD]
    ]
    # No name of a notebook or user calls a channel's members, as `<!here>` and `@all` do.
    harmless = text.replace("<", "‹").replace(">", "›").replace("@", "@\u200b")
    document = {"text": harmless, "host": host, "time": wall, "alerts": alerts}
    return Message(subject, text, document)


def _shown(text: str) -> str:
    return printable(" ".join(text.split()), MOST_LETTERS)


def deliver(place: Destination, told: Message) -> None:
    """Sends the message `told`, within DELIVERY_SECONDS. Raises GpuError, OSError or an error of tornado."""
    if place.is_webhook:
        asyncio.run(_post(place.address, msgspec.json.encode(told.document)))
    else:
        _mail(place.address, told)


async def _post(url: str, body: bytes) -> None:
    try:
        from tornado.simple_httpclient import SimpleAsyncHTTPClient
    except ImportError:
        raise GpuError(
            "a webhook needs tornado.  Install it:  pip install 'gpu-console[serve]'"
        ) from None
    # A redirect is not followed: the address in the file is the one that gets the message.
    client = SimpleAsyncHTTPClient(force_instance=True, max_body_size=1 << 16)
    try:
        await client.fetch(
            url, method="POST", body=body, headers={"Content-Type": "application/json"},
            follow_redirects=False, connect_timeout=10.0, request_timeout=DELIVERY_SECONDS,
        )  # fmt: skip
    finally:
        client.close()


def _mail(address: str, told: Message) -> None:
    program = shutil.which("sendmail", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/lib")
    if program is None:
        raise GpuError("mail needs the program sendmail, and this machine has none")
    mail = EmailMessage()
    mail["To"], mail["Subject"] = address, told.subject
    mail["Auto-Submitted"] = "auto-generated"
    mail.set_content(told.text)
    try:
        ended = subprocess.run(
            [program, "-i", "--", address], input=bytes(mail), capture_output=True,
            timeout=DELIVERY_SECONDS, start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise GpuError(f"sendmail did not end in {DELIVERY_SECONDS:.0f} s") from None
    if ended.returncode:
        said = printable(" ".join(ended.stderr.decode(errors="replace").split()), 200)
        raise GpuError(f"sendmail ended with {ended.returncode}: {said}".rstrip(": "))


def why_not(failure: BaseException) -> str:
    """Why a message did not arrive, in one line without the address."""
    status = getattr(failure, "code", None)  # of tornado's error; its text is the status' name
    text = printable(" ".join(str(failure).split()), 200) or type(failure).__name__
    return f"HTTP {status}" if isinstance(status, int) and status != 599 else text


# -- telling


class Teller:
    """Compares what each destination knows with the problems that there are, every ROUND_SECONDS."""

    def __init__(
        self,
        read: Callable[[], Snapshot],
        file: Path,
        *,
        send: Callable[[Destination, Message], None] = deliver,
        start: Callable[[Callable[[], None]], Any] = threads.start,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`read` returns a snapshot. `file` has the destinations. Tests replace the other functions."""
        self._read, self._file, self._send, self._start = read, file, send, start
        self._clock, self._wall, self._began = clock, wall, clock()
        self._since: dict[str, float] = {}  # when each present problem was first seen
        self._seen_at: dict[str, float] = {}  # when each problem was last seen
        self._told: dict[str, dict[str, str]] | None = None  # as in State; None: not read yet
        self._busy: set[str] = set()  # keys of the destinations to which a message is on its way
        self._pauses: dict[str, tuple[float, float]] = {}  # after failures: until when, how long
        self._warned = ""

    def run(self) -> None:
        """Tells for ever, as soon as no other process of this user does."""
        while True:
            try:
                make_directory(local_state())
                with locked(local_state() / "alerts.teller"):
                    while True:
                        self.round()
                        time.sleep(ROUND_SECONDS)
            except OSError as error:  # such as a full disk
                self._warn(f"no alert is told: {error}")
                time.sleep(ROUND_SECONDS)

    def round(self) -> None:
        """Looks once, and starts a thread for each destination that has something to be told. Never raises."""
        try:
            if places := destinations(self._file):
                self._tell_of(self._read(), places)
                self._warned = ""
        except Exception as error:  # what is unknown has neither begun nor ended
            self._warn(f"no alert is told: {error}")

    def _tell_of(self, snapshot: Snapshot, places: Collection[Destination]) -> None:
        now, wall, state = self._clock(), self._wall(), read_state()
        if self._told is None:
            self._told = state.told
        found = {name_of(problem): problem.text for problem in problems(snapshot)}
        self._since = {name: self._since.get(name, now) for name in found}
        known = {name for told in self._told.values() for name in told}
        # Of a problem that an earlier process has told, nothing was seen since this one began.
        seen_at = {name: self._seen_at.get(name, self._began) for name in known}
        self._seen_at = seen_at | dict.fromkeys(found, now)
        silent = {name for name in known | {*found} if state.silence_of(name, wall)}
        for place in places:
            if place.key in self._busy or now < self._pauses.get(place.key, (0.0, 0.0))[0]:
                continue
            told = self._told.get(place.key, {})
            begun = {
                name: text
                for name, text in found.items()
                if name not in told and name not in silent
                if now - self._since[name] >= SETTLE_SECONDS
            }
            ended = {
                name: text
                for name, text in told.items()
                if name not in found and name not in silent
                if now - self._seen_at[name] >= SETTLE_SECONDS
            }
            if begun or ended:
                host = snapshot.host or snapshot.owner.host
                what = message(host, begun, ended, state, wall)
                after = {name: text for name, text in told.items() if name not in ended} | begun
                self._busy.add(place.key)
                self._start(partial(self._tell, place, what, after, [*ended]))

    def _tell(
        self, place: Destination, what: Message, after: dict[str, str], ended: Collection[str]
    ) -> None:
        """Sends one message. Notes what the `place` knows `after` it has arrived, or why it has not."""
        key, why = place.key, ""
        try:
            self._send(place, what)
            self._pauses.pop(key, None)
            assert self._told is not None  # the caller has read it
            self._told[key] = after  # also if the state cannot be written, as on a full disk
        except Exception as failure:  # a receiver may fail in any way
            _, before = self._pauses.get(key, (0.0, RETRY_SECONDS / 2))
            pause = min(MOST_RETRY_SECONDS, 2 * before)
            self._pauses[key] = self._clock() + pause, pause
            why = f"{_clock(self._wall(), self._wall())}: {why_not(failure)}"
            log.warning("an alert did not reach the %s at %s", place.label, why)

        def noted(old: State) -> State:
            failures = {other: text for other, text in old.failures.items() if other != key}
            if why:
                return replace(old, failures=failures | {key: why})
            known = {name: mark for name, mark in old.acknowledged.items() if name not in ended}
            told = old.told | {key: after}
            return replace(old, failures=failures, told=told, acknowledged=known)

        try:
            _change(noted)
        except OSError as error:  # such as a full disk, which may be the problem
            self._warn(f"the state of alerts cannot be written: {error}")
        self._busy.discard(key)

    def _warn(self, text: str) -> None:
        if text != self._warned:
            self._warned = text
            log.warning("%s", text)


def start(read: Callable[[], Snapshot], setting: str | None) -> None:
    """Tells of the problems in the snapshots that `read` returns, in a thread, while this process lives.

    `setting` is the value of GPU_ALERTS.
    """
    threads.start(Teller(read, file_of(setting)).run)


# -- `gpu alerts`


def listing(found: Collection[Problem], path: Path, wall: float) -> str:
    """The problems `found` with their names and marks, the silences, and the destinations in the file `path`."""
    state, places = read_state(), destinations(path)
    lines = [
        "  ".join(filter(None, (name_of(alarm), str(alarm), state.words(name_of(alarm), wall))))
        for alarm in found
    ] or ["No problems."]
    for what, mark in _lasting(state.silenced, wall).items():
        lines.append(f"Silence of {what}, by {mark.by} until {_clock(mark.until, wall)}")
    for place in places:
        failure = state.failures.get(place.key)
        known = f"knows of {len(state.told.get(place.key, {}))}"
        lines.append(f"{place.label}: {f'not reached at {failure}' if failure else known}")
    if not places:
        lines.append(f"Nobody is told. One URL of a webhook or one mail address a line:  {path}")
    return "\n".join(lines)


def test(path: Path, host: str) -> str:
    """Sends a message to each destination in the file `path` now. Returns a line for each: whether it arrived."""
    lines = []
    text = "This is a test. Nothing is wrong."
    what = Message(
        f"{host}: test of alerts", text, {"text": f"{host}: {text}", "host": host, "alerts": []}
    )
    for place in destinations(path):
        try:
            deliver(place, what)
            lines.append(f"{place.label}: accepted")
        except Exception as failure:  # a receiver may fail in any way; the line says how
            lines.append(f"{place.label}: not reached: {why_not(failure)}")
    return "\n".join(lines) or f"There is no destination in {path}"
