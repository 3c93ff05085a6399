"""Where a server listens and how its token reaches its user: private sockets, ports, and the printed URL."""

import errno
import os
import socket
import stat
from types import SimpleNamespace

import pytest

from gpu_runtime.errors import GpuError
from gpu_runtime.web import http_server
from tests.faces.served import OPERATORS, free_port


@pytest.fixture
def mine(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path


def test_a_new_directory_is_private(mine):
    before = os.umask(0)
    try:
        assert http_server.prepare(str(mine / "new" / "s")) == mine / "new" / "s"
    finally:
        os.umask(before)
    assert stat.S_IMODE((mine / "new").stat().st_mode) == 0o700
    with pytest.raises(GpuError, match="107 are the most"):
        http_server.prepare(str(mine / ("x" * 120)))


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o777])
def test_a_directory_that_others_may_enter_is_refused(mine, mode):
    (mine / "open").mkdir()
    (mine / "open").chmod(mode)
    with pytest.raises(GpuError, match=r"yours alone \(mode 0700\)"):
        http_server.prepare(str(mine / "open" / "s"))


def test_a_directory_that_others_could_replace_is_refused(mine):
    """Another user's server there would receive Jupyter's cookies."""
    inner = mine / "shared" / "mine"
    inner.mkdir(parents=True)
    inner.chmod(0o700)
    (mine / "shared").chmod(0o777)
    with pytest.raises(GpuError, match="could be replaced by others: .*shared can be changed"):
        http_server.prepare(str(inner / "s"))
    (mine / "link").symlink_to(inner)
    with pytest.raises(GpuError, match="could be replaced by others"):
        http_server.prepare(str(mine / "link" / "s"))
    (mine / "shared").chmod(0o1777)  # like /tmp: a user cannot rename another user's files
    assert http_server.prepare(str(inner / "s"))


def test_an_existing_file_or_server_is_not_replaced(mine):
    """A link is not followed. A socket without a server is removed."""
    (mine / "file").write_text("precious")
    (mine / "link").symlink_to(mine / "elsewhere")
    for name in ("file", "link"):
        with pytest.raises(GpuError, match="exists and is no socket"):
            http_server.prepare(str(mine / name))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(mine / "live"))
        listening.listen()
        with pytest.raises(GpuError, match="a server listens on .*live already"):
            http_server.prepare(str(mine / "live"))
    assert http_server.prepare(str(mine / "live")) and not (mine / "live").exists()
    assert (mine / "file").read_text() == "precious"


def test_the_first_free_port_is_used_unless_one_was_named():
    """On a shared machine, other users' consoles have the first ports."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert http_server.free_port("127.0.0.1", port, tries=50) > port
        with pytest.raises(
            GpuError,
            match=f"port {port} of 127.0.0.1 is in use. Take another:  gpu console --port N",
        ):
            http_server.free_port("127.0.0.1", port, tries=1)


@pytest.mark.parametrize(
    ("port", "losses", "listens"),
    [(None, 4, True), (0, 4, True), (None, 5, False), (8211, 1, False)],
)
def test_a_port_that_another_process_binds_meanwhile_is_replaced_by_the_next(port, losses, listens):
    """Several servers start at the same time and find the same free port. A port that a user named is not replaced."""
    addresses = []

    def make_server(service, rules, address):
        addresses.append(address)
        if len(addresses) <= losses:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        return http_server.WebServer()

    service = http_server.Service(
        "gpu serve", command="gpu serve", default_port=free_port(), ports_tried=50
    )
    if port:
        port = free_port()
    where = (make_server, service, http_server.access_rules(), "127.0.0.1", port, None)
    if listens:
        _, address = http_server.bound(*where)
        assert address is addresses[-1] and len(addresses) == losses + 1
        assert address.port > 0
    else:
        with pytest.raises(GpuError, match="Address already in use.*Try again:  gpu serve"):
            http_server.bound(*where)
        assert len(addresses) == losses


def test_each_start_makes_a_new_token(environment):
    """Unless a setting contains one."""
    first, second = http_server.access_rules(), http_server.access_rules()
    assert len(first.operator_token) > 40 and first.operator_token != second.operator_token
    assert not first.viewer_token
    environment.setenv("GPU_CONSOLE_TOKEN", OPERATORS)
    environment.setenv("GPU_CONSOLE_OPERATORS", " ann,bob ,")
    environment.setenv("GPU_CONSOLE_READ_ONLY", "true")
    rules = http_server.access_rules()
    assert (rules.operator_token, rules.operators) == (OPERATORS, {"ann", "bob"})
    assert rules.read_only


def test_only_a_terminal_gets_the_url_with_the_token(environment, tmp_path):
    """Other output may be a log. The URL is then in a file that nobody else can read."""
    environment.setenv("XDG_STATE_HOME", str(tmp_path))
    address = f"http://127.0.0.1:8211/?token={OPERATORS}"
    environment.setattr("sys.stdout", SimpleNamespace(isatty=lambda: True))
    assert http_server.printable_address(address) == (address, None)
    environment.setattr("sys.stdout", SimpleNamespace(isatty=lambda: False))
    for _ in range(2):  # the file of an ended process with the same number is replaced
        text, file = http_server.printable_address(address)
    assert text == f"http://127.0.0.1:8211/\n  The URL with its token:  cat {file}"
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == (f"{address}\n", 0o600)


def test_a_server_starts_on_a_full_disk_and_shows_no_token(environment, tmp_path):
    """The operator needs the console most when the disk is full. It ended with a traceback."""
    environment.setattr("sys.stdout", SimpleNamespace(isatty=lambda: False))
    environment.setattr(http_server, "state_home", lambda: tmp_path / "file" / "below")
    (tmp_path / "file").touch()  # nothing can be made below a file, as on a full disk
    text, file = http_server.printable_address(f"http://127.0.0.1:8211/?token={OPERATORS}")
    assert "cannot be written" in text and OPERATORS not in text and file is None


def test_a_browser_gets_the_token_from_a_file_not_from_its_command_line(environment):
    """Every user of the machine can read a command line."""
    opened_with = []
    environment.setenv("DISPLAY", ":0")
    environment.setattr(http_server.webbrowser, "open", opened_with.append)
    left = http_server.open_browser(f"http://127.0.0.1:8211/?token={OPERATORS}")
    assert OPERATORS not in opened_with[0] and opened_with[0].startswith("file:///")
    assert stat.S_IMODE(left.stat().st_mode) == 0o600 and OPERATORS in left.read_text()
    left.unlink()
    environment.delenv("DISPLAY")
    environment.delenv("WAYLAND_DISPLAY", raising=False)
    assert http_server.open_browser("http://127.0.0.1:8211/") is None
