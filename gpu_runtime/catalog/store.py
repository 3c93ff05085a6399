"""The model catalogue: what models there are, for every process that shares it, beyond the life of any.

    CATALOG/                  GPU_CATALOG, or gpu-console/catalog in the state directory
        catalog.json          what `apply` wrote: replaced whole, under catalog.lock
        catalog.damaged-1     set aside, because it could not be read
        *.yaml *.yml *.json   written by hand: read as well, never written

GPU_CATALOG may also name one file, by hand or not. An entry is kept as it was written; what it means is `entries.py`'s
to say, and the shapes of files are `manifests.py`'s.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml
from filelock import FileLock, Timeout

from ..errors import BadDocument, BadSetting, CatalogUnavailable, UnknownModel
from ..facts import Applied, ModelSpec
from ..settings import Settings
from .documents import MOST_BYTES, read
from .entries import Entry, notes, spec_of
from .manifests import Manifest, manifests

OURS = "catalog.json"
MOST_STORED_BYTES = 64 << 20
PATIENCE_SECONDS = 10.0
_SUFFIXES = (".yaml", ".yml", ".json")


class _Stored(msgspec.Struct):
    """What lies in the file that `apply` writes."""

    gpu_console_catalog: int  # the version of this shape
    models: list[dict[str, Any]]


VERSION = 1
_decode = msgspec.json.Decoder(_Stored).decode


def default_place() -> Path:
    """Where this user's own catalogue lies: in the state directory, which survives boots."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "gpu-console" / "catalog"


class Catalog:
    """The catalogue that these settings name. Threads and processes may share one; it is read anew where it changed."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        place = Path(settings.gpu_catalog).expanduser() if settings.gpu_catalog else default_place()
        self.place = place.absolute()
        one_file = self.place.suffix in _SUFFIXES and not self.place.is_dir()
        self.directory = self.place.parent if one_file else self.place
        self.file = self.place if one_file else self.place / OURS  # that `apply` writes
        self._one_file = one_file
        self._known: tuple[Any, dict[str, Entry]] = (None, {})

    # -- reading

    def entries(self) -> Mapping[str, Entry]:
        """All models, by name. Raises CatalogUnavailable, BadDocument."""
        files = self._files()
        stamp = tuple((str(file), _stamp(file)) for file in files)
        if self._known[0] != stamp:
            found: dict[str, Entry] = {}
            for file in files:
                for entry in self._read(file):
                    if entry.name in found:
                        raise CatalogUnavailable(
                            f"{entry.name} stands in two files of the catalogue: {found[entry.name].file} and {file}.\n"
                            f"  Take it out of one of them.",
                            path=str(file),
                            why="twice",
                        )
                    found[entry.name] = entry
            self._known = stamp, found
        return self._known[1]

    def entry(self, name: str) -> Entry | None:
        """The model of that name, or the only one with that id. Raises as `entries`."""
        entries = self.entries()
        if name in entries:
            return entries[name]
        called = [entry for entry in entries.values() if entry.id == name]
        return called[0] if len(called) == 1 else None

    def spec(self, name: str) -> ModelSpec | None:
        """What that model is to this process; None where there is none of that name. Raises as `entries`."""
        entry = self.entry(name)
        return spec_of(entry, self.settings) if entry else None

    def specs(self) -> tuple[ModelSpec, ...]:
        """All of them, by name. Raises as `entries`."""
        return tuple(spec_of(entry, self.settings) for _, entry in sorted(self.entries().items()))

    def inspect(self, name: str, format: str = "") -> Any:
        """What was written of a model, as a document that `apply` takes again: a dict, or text in yaml or json.

        Raises UnknownModel, BadSetting, CatalogUnavailable.
        """
        body = self._require(name).body
        if format in ("", None):
            return json.loads(json.dumps(body))  # the caller's own
        if format == "json":
            return json.dumps(body, indent=2, ensure_ascii=False)
        if format == "yaml":
            return as_yaml(body)
        raise BadSetting("--format", format, "yaml or json")

    def _require(self, name: str) -> Entry:
        entry = self.entry(name)
        if entry is None:
            raise UnknownModel(
                name,
                tuple(self.entries()),
                advice="Add it to the catalogue:  gpu apply -f FILE",
                none="The catalogue is empty.",
            )
        return entry

    def _files(self) -> list[Path]:
        if self._one_file:
            return [self.file] if self.file.exists() else []
        try:
            names = sorted(
                name
                for name in os.listdir(self.directory)
                if name.endswith(_SUFFIXES) and name[0] != "."
            )
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._unreadable(self.directory, error) from error
        return [self.directory / name for name in names]

    def _read(self, file: Path) -> list[Entry]:
        data = self._bytes(file)
        if data is None:
            return []
        if file == self.file and (file.name == OURS or _is_ours(data)):
            return self._stored(data)
        documents = read(data, str(file))
        return (
            [_entry(manifest, file) for manifest in manifests(documents, str(file))]
            if documents
            else []
        )

    def _bytes(self, file: Path) -> bytes | None:
        try:
            with open(file, "rb") as opened:
                return opened.read(MOST_STORED_BYTES)
        except FileNotFoundError:  # deleted since it was listed
            return None
        except OSError as error:
            raise self._unreadable(file, error) from error

    def _unreadable(self, file: Path, error: OSError) -> CatalogUnavailable:
        why = error.strerror or str(error)
        return CatalogUnavailable(
            f"the catalogue {file} cannot be read ({why}).\n  Make it readable, or use another:  "
            f"GPU_CATALOG=DIRECTORY",
            path=str(file),
            why=why,
        )

    def _stored(self, data: bytes) -> list[Entry]:
        try:
            stored = _decode(data)
            if stored.gpu_console_catalog > VERSION:
                raise CatalogUnavailable(
                    f"a newer gpu-console wrote the catalogue {self.file}.\n  Upgrade this environment, or use another:  "
                    f"GPU_CATALOG=DIRECTORY",
                    path=str(self.file),
                    why="newer",
                )
            entries = [
                Entry(body["metadata"]["name"], body, str(self.file)) for body in stored.models
            ]
            for entry in entries:
                spec_of(entry, self.settings)
            return entries
        except (
            msgspec.MsgspecError,
            UnicodeDecodeError,
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
        ) as error:
            raise _Damaged(
                f"the catalogue {self.file} is damaged ({_first_line(error)}).\n  Apply your files again:  gpu apply -f "
                f"FILE      (it is set aside then, and nothing in it is lost)",
                path=str(self.file),
                why="damaged",
            ) from error

    # -- writing

    def apply(self, file: str | os.PathLike[str]) -> Applied:
        """Adds the models of a file, or changes those that are there already; all of them, or none.

        Raises BadDocument, which names file, line and field, and CatalogUnavailable.
        """
        name, data, base = _given(file)
        new = [_entry(manifest, self.file, base) for manifest in manifests(read(data, name), name)]
        with self._locked():
            known, set_aside = self._for_writing()
            self._require_ours(new, known)
            ours = {name: entry for name, entry in known.items() if entry.file == str(self.file)}
            added = tuple(entry.name for entry in new if entry.name not in ours)
            changed = tuple(
                entry.name
                for entry in new
                if entry.name in ours and ours[entry.name].body != entry.body
            )
            if added or changed:
                self._write({**ours, **{entry.name: entry for entry in new}}.values())
        of: dict[str, list[str]] = {}  # who a note is about: many models have the same one
        for entry in new:
            for note in notes(entry, self.settings):
                of.setdefault(note, []).append(entry.name)
        said = [f"{', '.join(names)}: {note}" for note, names in of.items()]
        if set_aside:
            said.insert(0, f"the catalogue was damaged; what it held lies in {set_aside}")
        same = tuple(entry.name for entry in new if entry.name not in (*added, *changed))
        return Applied(name, added, changed, same, tuple(said))

    def delete(self, name: str) -> Entry:
        """Takes a model out of the catalogue, and returns what it was. Raises UnknownModel, CatalogUnavailable."""
        with self._locked():
            entry = self._require(name)
            if entry.file != str(self.file) or self._by_hand():
                raise CatalogUnavailable(
                    f"{entry.name} stands in {entry.file}, which was written by hand.\n"
                    f"  Take it out there.",
                    path=entry.file,
                    why="by hand",
                )
            ours = [
                other
                for other in self.entries().values()
                if other.file == str(self.file) and other.name != entry.name
            ]
            self._write(ours)
        return entry

    def _locked(self) -> Any:
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = self.directory.stat().st_mode & 0o666  # whoever may write here may lock
            return FileLock(
                self.directory / f"{self.file.stem}.lock", timeout=PATIENCE_SECONDS, mode=mode
            ).acquire()
        except Timeout:
            raise CatalogUnavailable(
                f"another process has been writing the catalogue {self.file} for {PATIENCE_SECONDS:.0f} s; perhaps it "
                f"is stopped.\n  See who:  fuser -v {self.directory / self.file.stem}.lock",
                path=str(self.file),
                why="locked",
            ) from None
        except OSError as error:
            raise self._unwritable(error) from error

    def _for_writing(self) -> tuple[Mapping[str, Entry], str]:
        """The entries, and where the file was set aside to, where it was damaged."""
        try:
            return self.entries(), ""
        except _Damaged:
            aside = _free_name(self.file.with_suffix(".damaged"))
            os.replace(self.file, aside)
            return self.entries(), str(aside)

    def _by_hand(self) -> bool:
        data = None if self.file.name == OURS else self._bytes(self.file)
        return data is not None and not _is_ours(data)

    def _require_ours(self, new: Iterable[Entry], known: Mapping[str, Entry]) -> None:
        if self._by_hand():
            raise CatalogUnavailable(
                f"the catalogue {self.file} was written by hand, and is not overwritten.\n"
                f"  Add to it there, or use a directory:  GPU_CATALOG=DIRECTORY",
                path=str(self.file),
                why="by hand",
            )
        for entry in new:
            if entry.name in known and known[entry.name].file != str(self.file):
                raise CatalogUnavailable(
                    f"{entry.name} stands in {known[entry.name].file}, which was written by hand.\n"
                    f"  Change it there.",
                    path=known[entry.name].file,
                    why="by hand",
                )

    def _write(self, entries: Iterable[Entry]) -> None:
        """Replaces the file, whole, so that whoever reads it finds the old one or the new one."""
        bodies = [entry.body for entry in sorted(entries, key=lambda entry: entry.name)]
        data = json.dumps(
            {"gpu_console_catalog": VERSION, "models": bodies}, indent=1, ensure_ascii=False
        ).encode()
        draft = self.file.with_name(f".{self.file.name}-{secrets.token_hex(4)}")
        try:
            try:
                with open(draft, "xb") as file:
                    if self.file.exists():
                        os.fchmod(file.fileno(), self.file.stat().st_mode & 0o777)
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(draft, self.file)
            finally:
                draft.unlink(missing_ok=True)
            directory = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> CatalogUnavailable:
        why = error.strerror or str(error)
        return CatalogUnavailable(
            f"the catalogue {self.file} cannot be written ({why}); it is as it was.\n"
            f"  Make it writable, or use another:  GPU_CATALOG=DIRECTORY",
            path=str(self.file),
            why=why,
        )


class _Damaged(CatalogUnavailable):
    """The file that `apply` wrote cannot be read."""


def as_yaml(body: Mapping[str, Any]) -> str:
    """The document in YAML, its fields in their order."""
    return yaml.dump(body, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100).rstrip(
        "\n"
    )


class _Dumper(yaml.SafeDumper):
    """PyYAML's, but for text with rare line breaks, of which it would make spaces: that is quoted and escaped."""


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    rare = not text.replace("\n", "").isprintable()
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if rare else None)


_Dumper.add_representer(str, _text)


def _given(file: str | os.PathLike[str]) -> tuple[str, bytes, str]:
    """A file's name, its bytes, and the directory that its paths start from. `-` is what is typed or piped in."""
    name = os.fspath(file)
    try:
        if name == "-":
            return "standard input", sys.stdin.buffer.read(MOST_BYTES + 1), os.getcwd()
        with open(Path(name).expanduser(), "rb") as opened:
            return name, opened.read(MOST_BYTES + 1), str(Path(name).expanduser().absolute().parent)
    except OSError as error:
        raise BadDocument(name, 0, "", f"it cannot be read ({error.strerror or error})") from None


def _entry(manifest: Manifest, file: Path, base: str = "") -> Entry:
    """The entry to keep: its paths made absolute, since it leaves the file that they are relative to."""
    spec = dict(manifest.body["spec"])
    base = base or str(file.parent)
    if path := spec.get("path"):
        spec["path"] = absolute(path, base)
    if (template := spec.get("chat_template")) and "{" not in template:
        spec["chat_template"] = absolute(template, base)
    if (source := spec.get("source")) and (
        source[0] in ".~" or os.path.exists(absolute(source, base))
    ):
        spec["source"] = absolute(source, base)
    return Entry(manifest.name, {**manifest.body, "spec": spec}, str(file))


def absolute(path: str, base: str) -> str:
    """The path, taken from that directory where it is relative.

    >>> absolute("phi/../phi-4.gguf", "/srv/models"), absolute("/data/phi", "/srv/models")
    ('/srv/models/phi-4.gguf', '/data/phi')
    """
    return os.path.normpath(os.path.join(base, os.path.expanduser(path)))


def _is_ours(data: bytes) -> bool:
    return b'"gpu_console_catalog"' in data[:200]


def _stamp(file: Path) -> tuple[int, ...] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _free_name(path: Path) -> Path:
    number = 1
    while (free := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    return free


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
