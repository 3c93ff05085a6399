"""The file of keys: who may read it, what a mistake in it does, and the verb that writes it."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpu_runtime import access_keys, cli
from gpu_runtime.access_keys import AccessKey, KeysFile, add, digest, name_of, new_key, read
from gpu_runtime.errors import BadDocument, GpuError

SHA = "0" * 64


@pytest.fixture
def path(tmp_path):
    folder = tmp_path / "config"
    folder.mkdir(mode=0o700)
    return folder / "keys.json"


def test_a_key_is_found_by_its_hash_alone(path):
    """The file contains no key, only hashes, and has mode 0600. Names and hashes are not accepted as keys."""
    made = {}
    for name in ("bot", "web"):
        made[name], sha256 = new_key()
        add(path, name, AccessKey(sha256))
    keys = read(path)
    assert {name: name_of(keys, key) for name, key in made.items()} == {"bot": "bot", "web": "web"}
    for wrong in ("", "bot", keys["bot"].sha256, made["bot"][:-1], made["bot"] + " ", "\ud800"):
        assert name_of(keys, wrong) == ""
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert made["bot"] not in path.read_text() and len(made["bot"]) > 40


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_others_may_use_is_refused(path, mode):
    add(path, "bot", AccessKey(SHA))
    path.chmod(mode)
    with pytest.raises(BadDocument, match=f"mode {mode:o}.*chmod 600"):
        read(path)
    path.chmod(0o600)
    path.parent.chmod(0o777)
    with pytest.raises(BadDocument, match="another user could replace it"):
        read(path)


@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_only_a_plain_file_is_read(path, kind):
    """A read of a pipe would block the server."""
    if kind == "link":
        path.symlink_to(path.parent / "other")
    elif kind == "fifo":
        os.mkfifo(path, 0o600)
    else:
        path.mkdir()
    with pytest.raises(BadDocument):
        read(path)


@pytest.mark.parametrize("content", [
    b"{", b"[]", b'{"keys": {"a": {}}}', b'{"keys": {"a b": {"sha256": "%s"}}}' % SHA.encode(),
    b'{"keys": {"a": {"sha256": "short"}}}',
    b'{"keys": {"a": {"sha256": "%s", "modles": []}}}' % SHA.encode(),
    b'{"keys": {"a": {"sha256": "%s", "requests_a_minute": 0}}}' % SHA.encode(),
    b'{"keys": {"a": {"sha256": "%s", "importance": "huge"}}}' % SHA.encode(),
])  # fmt: skip
def test_a_mistake_in_a_changed_file_keeps_the_earlier_keys(path, content):
    """While the server runs, a mistake in the file keeps the earlier keys. At the start of the
    server, a mistake is an error.
    """
    add(path, "bot", AccessKey(SHA))
    now, reports = [0.0], []
    keys = KeysFile(path, lambda: now[0], reports.append)
    path.write_bytes(content)
    with pytest.raises(BadDocument, match="no file of keys"):
        read(path)
    assert set(keys.keys()) == {"bot"} and reports == []
    now[0] = 1.0
    assert set(keys.keys()) == {"bot"} and "the earlier keys stay" in reports[0]
    path.unlink()
    now[0] = 2.0
    assert keys.keys() == {}


@pytest.mark.parametrize(
    ("name", "importance", "fits"),
    [
        ("a" * 64, 1, True),
        ("a.b-c_d", 100, True),
        ("a" * 65, 1, False),
        ("", 1, False),
        ("a b", 1, False),
        ("bot", 0, False),
        ("bot", 101, False),
    ],
)
def test_names_and_importances_have_the_same_limits_when_a_key_is_added_and_when_it_is_read(
    path, name, importance, fits
):
    key = AccessKey(SHA, importance=importance)
    if fits:
        add(path, name, key)
        assert read(path) == {name: key}
        return
    with pytest.raises(GpuError):
        add(path, name, key)
    fields = {"sha256": SHA, "importance": importance}
    path.write_text(json.dumps({"keys": {name: fields}}))
    path.chmod(0o600)
    with pytest.raises(BadDocument):
        read(path)


def test_a_file_has_a_bounded_number_of_keys_and_of_bytes(path, monkeypatch):
    for name in "ab":
        add(path, name, AccessKey(SHA))
    for limit, least in (("MOST_KEYS", 2), ("MOST_BYTES", path.stat().st_size)):
        with monkeypatch.context() as patch:
            patch.setattr(access_keys, limit, least)
            assert set(read(path)) == {"a", "b"}
            patch.setattr(access_keys, limit, least - 1)
            with pytest.raises(BadDocument):
                read(path)


def test_keys_that_are_added_at_once_are_all_kept(path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: add(path, f"key{n}", AccessKey(SHA)), range(16)))
    assert len(read(path)) == 16
    with pytest.raises(GpuError, match="exists already"):
        add(path, "key3", AccessKey(SHA))


def test_the_verb_adds_lists_and_removes(path, environment, capsys):
    """A new key is shown once. The list of keys contains neither keys nor hashes."""
    environment.setenv("GPU_SERVE_KEYS", str(path))
    options = ["--models", "qwen*,task:chat", "--importance", "low", "--requests", "9"]
    assert cli.main(["keys", "add", "bot", *options, "--tokens", "1000"]) == 0
    key = capsys.readouterr().out.split()[-1]
    assert name_of(read(path), key) == "bot"
    assert read(path)["bot"] == AccessKey(
        digest(key), "user", ("qwen*", "task:chat"), "low", 9, 1000
    )
    assert cli.main(["keys", "list"]) == 0
    listed = capsys.readouterr().out
    assert "qwen*,task:chat" in listed and digest(key) not in listed and key not in listed
    assert cli.main(["keys", "remove", "bot"]) == 0 and read(path) == {}
    for words in (["remove", "bot"], ["add", "a/b"], ["add"]):
        assert cli.main(["keys", *words]) == 1
    for models in ("", "qwen,", " ,qwen"):  # as of an empty variable: it used to allow all models
        assert cli.main(["keys", "add", "web", "--models", models]) and read(path) == {}
    assert cli.main(["keys", "add", "web", "--models", "qwen, phi"]) == 0
    assert read(path)["web"].models == ("qwen", "phi")
    assert cli.main(["keys", "add", "all"]) == 0 and read(path)["all"].models == ("*",)
    for name in ("web", "all"):
        assert cli.main(["keys", "remove", name]) == 0
    assert "Make one:  gpu keys add NAME" in access_keys.table({})
    assert json.loads(path.read_text()) == {"keys": {}}
