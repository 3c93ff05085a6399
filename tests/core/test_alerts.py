"""Alerts: who is told of a problem, when, how often; and that no receiver holds up anything."""

import http.server
import json
import logging
import os
import socket
import threading
from email import message_from_bytes

import pytest
from msgspec.structs import replace

from gpu_runtime import GpuError, alerts, cli, files, verbs
from gpu_runtime.alerts import SETTLE_SECONDS, Destination, Teller
from gpu_runtime.errors import BadDocument
from gpu_runtime.facts import problems
from tests.clock import PATIENCE, until
from tests.faces.samples import ME, snapshot

CALM = snapshot()
FULL = replace(CALM, full_disks=("/var/lib/ledger",))
LOST = replace(FULL, degraded="cuda:3 (H100) does not answer: GPU is lost")
[NAME] = map(alerts.name_of, problems(FULL))


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "alerts.txt"
    path.touch(0o600)
    path.write_text("# whom we tell\n\nops@example.org\n")
    return path


class Story:
    """A teller with a clock and a recorder in place of the world."""

    def __init__(self, file, seen=CALM, fails=()):
        self.now, self.seen, self.sent = 1000.0, seen, []
        self.fails = list(fails)  # the outcome of each attempt: an error, or None
        self.teller = Teller(
            lambda: self.seen, file, send=self.send, start=lambda work: work(), clock=lambda: self.now,
            wall=lambda: 1.7e9 + self.now,
        )  # fmt: skip

    def send(self, place, what):
        error = self.fails.pop(0) if self.fails else None
        if error:
            raise error
        self.sent += [(place.address, one["state"], one["name"]) for one in what.document["alerts"]]

    def after(self, seconds, seen):
        """What is sent if the machine is as `seen` for `seconds`."""
        self.seen, before = seen, len(self.sent)
        for _ in range(int(seconds / 5)):
            self.teller.round()
            self.now += 5
        return self.sent[before:]


def test_the_commands_list_acknowledge_and_silence(file, tmp_path, monkeypatch, capsys):
    """GPU_ALERTS names the file. The path of a webhook is not shown."""
    monkeypatch.setenv("GPU_ALERTS", str(file))
    monkeypatch.setenv("GPU_LEDGER", f"keeper://{tmp_path}/ledger")
    monkeypatch.setattr(verbs, "problems", lambda seen: problems(FULL))
    file.write_text("https://hooks.example.org/SECRET\n")

    def gpu(*words):
        code = cli.main(["alerts", *words])
        out, err = capsys.readouterr()
        assert "SECRET" not in out + err
        return (code, out + err)

    assert NAME in gpu()[1] and "webhook at hooks.example.org: knows of 0" in gpu()[1]
    assert gpu("ack", NAME)[1].startswith(f"{NAME}: acknowledged by ")
    assert "silenced by" in gpu("silence", "all", "--for", "2h")[1]
    assert "Acknowledged by" in gpu()[1] and "Silence of all, by" in gpu()[1]
    assert gpu("end", "all") == (0, "all: no longer silenced\n")
    assert gpu("ack", "nothing")[0] == gpu("silence")[0] == 1
    assert gpu("silence", "all", "--for", "soon")[0] == gpu("shout", "all")[0] == 2


BEGIN, END = ("ops@example.org", "begins", NAME), ("ops@example.org", "ends", NAME)


def test_a_problem_is_told_once_when_it_begins_and_once_when_it_ends(file):
    story = Story(file)
    assert story.after(60, CALM) == []
    assert story.after(3600, FULL) == [BEGIN]
    assert story.after(3600, CALM) == [END]
    assert story.after(60, FULL) == [BEGIN], "it is a new one"


def test_one_that_comes_and_goes_is_not_told_each_time(file):
    story = Story(file)
    assert story.after(SETTLE_SECONDS - 5, FULL) + story.after(60, CALM) == []
    assert story.after(60, FULL) == [BEGIN]
    for _ in range(5):
        assert story.after(SETTLE_SECONDS - 5, CALM) + story.after(60, FULL) == []


def test_a_process_that_starts_again_tells_nothing_twice(file):
    assert Story(file).after(60, FULL) == [BEGIN]
    assert Story(file).after(60, FULL) == []
    assert Story(file).after(60, CALM) == [END], "also of a problem that ended while nobody looked"


def test_machines_with_one_home_tell_of_their_own_problems(file, tmp_path, monkeypatch):
    """The first one would hold the lock of the home, and say of the others' problems that they have ended."""
    monkeypatch.setattr(files, "_MOUNTS", tmp_path / "mountinfo")
    files._MOUNTS.write_text("1 0 0:9 / / rw - nfs4 srv rw\n")
    for machine in ("one", "two"):
        monkeypatch.setattr(files, "FALLBACK", tmp_path / machine)
        assert Story(file).after(20, FULL) == [("ops@example.org", "begins", NAME)]


def test_what_cannot_be_read_has_neither_begun_nor_ended(file, caplog):
    story = Story(file)
    story.after(60, FULL)

    def broken():
        raise GpuError("the ledger does not answer")

    story.teller._read = broken
    with caplog.at_level(logging.WARNING, "gpu_runtime"):
        assert story.after(600, CALM) == []
    assert caplog.text.count("the ledger does not answer") == 1


def test_on_a_full_disk_a_problem_is_told_once_although_nothing_can_be_written(file, monkeypatch):
    """The full disk is the problem that is told."""
    story = Story(file)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(alerts, "replace_file", full)
    assert story.after(600, FULL) == [BEGIN]
    assert story.after(600, CALM) == [END]


def test_a_message_that_does_not_arrive_is_tried_again_less_and_less_often(file):
    story = Story(file, fails=[OSError("Connection refused")] * 3)
    assert story.after(15 + 20, FULL) == [] and len(story.fails) == 1
    assert "Connection refused" in alerts.listing(problems(FULL), file, 1.7e9)
    assert story.after(60, FULL) == [BEGIN]
    assert "Connection refused" not in alerts.listing(problems(FULL), file, 1.7e9)
    story.fails = [OSError("gone")] * 1000
    story.after(7200, CALM)
    assert 1000 - len(story.fails) < 25
    assert story.after(3600, FULL) == [], "what has begun again is known"


def test_a_silence_has_an_end_and_then_what_still_holds_is_told(file):
    story = Story(file)
    wall = 1.7e9 + story.now
    said = alerts.silence(NAME, "ann", problems(FULL), wall, 600)
    assert f"{NAME}: silenced by ann until" in said
    assert "Silenced by ann until" in alerts.listing(problems(FULL), file, wall)
    assert story.after(595, FULL) == []
    assert story.after(60, FULL) == [BEGIN]
    alerts.silence("disk_full", "ann", problems(FULL), wall, 1e6)
    assert story.after(600, CALM) == []
    alerts.end_silence("disk_full")
    assert story.after(10, CALM) == [END]
    alerts.silence("all", "ann", (), wall, 1e6)
    assert story.after(600, LOST) == []


def test_an_acknowledged_problem_says_by_whom_until_it_ends(file):
    story = Story(file)
    story.after(60, FULL)
    assert alerts.acknowledge(NAME, "bob, console", problems(FULL), 1.7e9 + story.now) == (
        f"{NAME}: acknowledged by bob, console"
    )
    assert "Acknowledged by bob, console at" in alerts.read_state().words(NAME, 1.7e9 + story.now)
    story.after(60, CALM)
    assert alerts.read_state().acknowledged == {}, "the next one is another"


def test_an_acknowledgement_that_is_over_is_forgotten_although_nobody_is_told(file):
    alerts.acknowledge(NAME, "bob", problems(FULL), 1.7e9)
    later = 1.7e9 + 2 * alerts.ACKNOWLEDGED_SECONDS
    alerts.acknowledge("driver_fault", "ann", problems(LOST), later)
    assert [mark.by for mark in alerts.read_state().acknowledged.values()] == ["ann"]


def test_a_teller_that_cannot_write_at_its_start_tells_later(file, monkeypatch, caplog):
    """A disk is full for a while, and the process goes on for months."""
    story, make = Story(file, FULL), alerts.make_directory
    pauses = iter(range(20))

    def full(*_):
        raise OSError(28, "No space left on device")

    def passes(seconds):
        if next(pauses, None) is None:
            raise KeyboardInterrupt
        story.now += seconds
        monkeypatch.setattr(alerts, "make_directory", make)

    monkeypatch.setattr(alerts, "make_directory", full)
    monkeypatch.setattr(alerts.time, "sleep", passes)
    with pytest.raises(KeyboardInterrupt):
        story.teller.run()
    assert story.sent == [BEGIN] and "no alert is told" in caplog.text


@pytest.mark.parametrize("act", [
    lambda: alerts.acknowledge("silent-0000", "ann", problems(FULL), 0.0),
    lambda: alerts.acknowledge("silent", "ann", problems(FULL), 0.0),
    lambda: alerts.silence("nonsense", "ann", problems(FULL), 0.0, 60),
    lambda: alerts.end_silence(NAME),
])  # fmt: skip
def test_a_wrong_name_is_one_error_that_says_what_to_type(file, act):
    with pytest.raises(GpuError, match="gpu alerts"):
        act()


@pytest.mark.parametrize(
    "line", ["ftp://x/y", "file:///x", "a@b c@d", "-oQ/tmp@x", "https://", "a@x.org,b@x.org"]
)
def test_a_line_that_is_no_destination_is_named(file, line):
    file.write_text(f"ops@example.org\n{line}\n")
    with pytest.raises(BadDocument, match="line 2"):
        alerts.destinations(file)


def test_a_file_that_others_can_read_is_refused(file):
    """A webhook's URL is a secret: who knows it can write to the channel."""
    file.chmod(0o644)
    with pytest.raises(BadDocument, match="chmod 600"):
        alerts.destinations(file)
    secret = Destination("https://hooks.example.org/services/SECRET?key=SECRET")
    assert secret.label == "webhook at hooks.example.org"


def test_a_lost_card_has_the_commands_in_the_message(file):
    [lost, _] = problems(LOST)
    assert "dmesg | grep Xid" in lost.text and "nvidia-smi -r -i 3" in lost.text
    told = alerts.message("box", {alerts.name_of(lost): lost.text}, {}, alerts.State(), 0.0)
    assert told.subject.startswith("box: begins: The monitor cannot see")
    assert f"gpu alerts ack {alerts.name_of(lost)}" in told.text


def test_a_notebook_cannot_call_a_channel_or_forge_a_line_of_a_mail():
    named = "<!channel> @all\nBcc: all@example.org \x1b[31m"
    told = alerts.message("box", {"silent-0000": named}, {}, alerts.State(), 0.0)
    assert "<!" not in told.document["text"] and "@all" not in told.document["text"]
    assert "\n" not in told.subject and "\x1b" not in told.text + told.subject
    assert "\nBcc" not in told.text


# -- real receivers


class Receiver(http.server.BaseHTTPRequestHandler):
    """Answers a path as it says: `/ok`, `/500`, `/302`, and `/slow`, which waits until the test ends."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/slow":
            self.server.over.wait(PATIENCE)
        status = {"/500": 500, "/302": 302}.get(self.path, 200)
        self.server.got.append((self.path, json.loads(body)))
        self.send_response(status)
        self.send_header("Location", "/ok")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def receiver():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    server.got, server.over = [], threading.Event()
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    yield server
    server.over.set()
    server.shutdown()
    serving.join()
    server.server_close()


def test_a_receiver_that_does_not_answer_delays_no_other_and_not_the_round(file, receiver):
    here = f"http://127.0.0.1:{receiver.server_port}"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen: it refuses
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}/"
        file.write_text(f"{here}/slow\n{dead}\n{here}/500\n{here}/302\n{here}/ok\n")
        now, ended = [0.0], []

        def start(work):
            def run():
                work()
                ended.append(work)

            threading.Thread(target=run, daemon=True).start()

        teller = Teller(lambda: FULL, file, start=start, clock=lambda: now[0], wall=lambda: 1.7e9)
        for _ in range(4):
            teller.round()  # returns although `/slow` holds its sender
            now[0] += 5
        until(lambda: len(ended) == 4)
    told = dict(receiver.got)
    assert [one["name"] for one in told["/ok"]["alerts"]] == [NAME]
    assert told["/ok"]["text"].splitlines()[0] == f"gpu-console on {ME.host}"
    assert "/slow" not in told
    failures = " ".join(alerts.read_state().failures.values())
    assert all(word in failures for word in ("HTTP 500", "HTTP 302", "refused"))
    assert [path for path, _ in receiver.got].count("/ok") == 1, "no redirect is followed"


SENDMAIL = """#!/bin/sh
echo "$@" >> {place}/words
{act}
cat >> {place}/mail
"""


@pytest.fixture
def sendmail(tmp_path, monkeypatch):
    """Puts a program `sendmail` that does `act` first into the PATH."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")

    def put(act=":"):
        program = tmp_path / "bin" / "sendmail"
        program.write_text(SENDMAIL.format(place=tmp_path, act=act))
        program.chmod(0o755)
        return tmp_path

    return put


def test_a_mail_goes_to_sendmail_with_its_address_as_an_argument(file, sendmail):
    place = sendmail()
    assert alerts.test(file, "box") == "mail to ops@example.org: accepted"
    assert (place / "words").read_text() == "-i -- ops@example.org\n"
    mail = message_from_bytes((place / "mail").read_bytes())
    assert (mail["To"], mail["Subject"]) == ("ops@example.org", "box: test of alerts")


def test_a_sendmail_that_fails_or_hangs_is_an_error_with_its_words(file, sendmail, monkeypatch):
    sendmail("echo no such queue >&2; exit 75")
    assert "not reached: sendmail ended with 75: no such queue" in alerts.test(file, "box")
    monkeypatch.setattr(alerts, "DELIVERY_SECONDS", 0.2)
    sendmail("exec sleep 600")
    assert "sendmail did not end" in alerts.test(file, "box")
