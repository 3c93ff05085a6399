"""The catalogue's files. All processes read them; `apply` and `delete` write only one of them.

    CATALOG/                  GPU_CATALOG, or gpu-console/catalog in the state directory
        catalog.json          what `apply` wrote: replaced whole, under catalog.lock
        catalog.damaged-1     a catalog.json that could not be read, set aside
        *.yaml *.yml *.json   written by hand: read as well, never written

GPU_CATALOG may also name one file, which a person or `apply` wrote. An entry (the description of
one model) keeps the fields that a person wrote, with absolute paths. `fields.py` makes a ModelSpec
from an entry. A file may mix three formats, in YAML or JSON:

    apiVersion: model.aispec.org/v1alpha1      models:               models:
    kind: Model                                  phi-4:                - name: llama3:70b
    metadata: {name: qwen3:8b}                     path: phi-4.gguf      memory: 42949672960
    spec: {memory: 10GB, runtime: ollama}          gpu_layers: -1        runtime: ollama

From left to right: the first format is a resource as in Kubernetes. The second is a mapping from
the models' names to their fields. In the third format, each model is a mapping of fields that
includes its name (or its id); such a mapping may also be a whole document, or be in a list at the
top. All models are converted to the first format.

Sources: Helix, Multi-GPU Scheduling, appendix B; Kitchen Brigade, GPU Allocation Semantics, section
4.
"""

from __future__ import annotations

import difflib
import itertools
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import msgspec
from msgspec.structs import replace

from ..arguments import bad_name, checked
from ..errors import (
    BadDocument,
    BadSetting,
    CatalogUnavailable,
    UnknownDevice,
    UnknownModel,
    first_line,
)
from ..facts import Applied, Device, ModelSpec
from ..files import lock_within, make_directory, read_limited, replace_file, stamp, state_home
from ..safe_text import quoted
from ..settings import Settings
from .fields import CatalogEntry, notes, problems, spec_of

if TYPE_CHECKING:
    from .documents import Document
    from .documents import Path as Place

log = logging.getLogger("gpu_runtime")
OURS = "catalog.json"
MOST_STORED_BYTES = 64 << 20
PATIENCE_SECONDS = 10.0
VERSION = 1
_SUFFIXES = (".yaml", ".yml", ".json")
_USE_ANOTHER = "use another:  GPU_CATALOG=DIRECTORY"


class _StoredFile(msgspec.Struct):
    """The content of the file that `apply` writes."""

    gpu_console_catalog: int  # the version of this format
    models: list[dict[str, Any]]


_decode = msgspec.json.Decoder(_StoredFile).decode
# The errors that decoding a damaged file may raise.
_NOT_READABLE = (msgspec.MsgspecError, KeyError, TypeError, ValueError, AttributeError)


class Catalog:
    """The catalogue that the settings name, for several threads and processes. Changed files are read again."""

    def __init__(self, settings: Settings) -> None:
        """Uses GPU_CATALOG and other `settings`. The files are read when they are first needed."""
        self.settings = settings
        given = settings.gpu_catalog
        place = Path(os.path.expanduser(given)) if given else state_home() / "catalog"
        self.place = place.absolute()
        self._one_file = self.place.suffix in _SUFFIXES and not self.place.is_dir()
        self.directory = self.place.parent if self._one_file else self.place
        self.file = self.place if self._one_file else self.place / OURS  # the file `apply` writes
        self._known: tuple[Any, dict[str, CatalogEntry]] = None, {}  # stamp of the files, entries

    # -- reading

    def entries(self) -> Mapping[str, CatalogEntry]:
        """All models by name. Raises CatalogUnavailable and BadDocument, as all methods do."""
        files = self._files()
        stamps = tuple((str(file), stamp(file)) for file in files)
        known = self._known  # another thread may replace it with the entries of older files
        if known[0] != stamps:
            known = self._known = stamps, self._read_all(files)
        return known[1]

    def entry(self, name: str) -> CatalogEntry | None:
        """The entry of the model `name`, else of the only model with the id `name`; else None."""
        entries = self.entries()
        if name in entries:
            return entries[name]
        with_id = [entry for entry in entries.values() if entry.id == name]
        return with_id[0] if len(with_id) == 1 else None

    def spec(self, name: str) -> ModelSpec | None:
        """The ModelSpec of the model `name`, or None."""
        entry = self.entry(name)
        return spec_of(entry, self.settings) if entry else None

    def specs(self) -> tuple[ModelSpec, ...]:
        """The ModelSpecs of all models, sorted by name."""
        return tuple(spec_of(entry, self.settings) for _, entry in sorted(self.entries().items()))

    @checked
    def inspect(self, name: str, format: str = "") -> Any:
        """The entry of the model `name`, as a document that `apply` accepts.

        The result is a dict, or text if `format` is yaml or json. Raises UnknownModel, BadSetting
        and the errors of `entries`.
        """
        body = self._require(name).body
        if format in ("", None):
            return json.loads(json.dumps(body))  # a copy, since the caller may change it
        if format == "json":
            return json.dumps(body, indent=2, ensure_ascii=False)
        if format == "yaml":
            from . import documents

            return documents.as_yaml(body)
        raise BadSetting("--format", format, "yaml or json")

    def _require(self, name: str) -> CatalogEntry:
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
            listed = os.listdir(self.directory)
        except FileNotFoundError:  # nothing has been applied yet
            return []
        except OSError as error:
            raise self._unreadable(self.directory, error) from error
        names = [name for name in listed if name.endswith(_SUFFIXES) and name[0] != "."]
        return [self.directory / name for name in sorted(names)]

    def _read_all(self, files: Iterable[Path]) -> dict[str, CatalogEntry]:
        found: dict[str, CatalogEntry] = {}
        for file in files:
            for entry in self._read(file):
                if entry.name in found:
                    raise _unavailable(
                        file,
                        "twice",
                        f"{entry.name} is in two files of the catalogue: {found[entry.name].file} "
                        f"and {file}.\n  Remove it from one of them.",
                    )
                found[entry.name] = entry
        return found

    def _read(self, file: Path) -> list[CatalogEntry]:
        data = self._bytes(file)
        if data is None:
            return []
        if file == self.file and (file.name == OURS or _is_ours(data)):
            return self._stored(data)
        from . import documents

        found = documents.read(data, str(file))
        models = manifests(found, str(file)) if found else ()
        return [_entry(manifest, file) for manifest in models]

    def _bytes(self, file: Path) -> bytes | None:
        """The content of `file`. None if the file was deleted after the directory was listed."""
        try:
            return read_limited(file, MOST_STORED_BYTES)
        except FileNotFoundError:  # deleted since it was listed
            return None
        except OSError as error:
            raise self._unreadable(file, error) from error

    def _unreadable(self, file: Path, error: OSError) -> CatalogUnavailable:
        why = error.strerror or str(error)
        text = (
            f"the catalogue {file} cannot be read ({why}).\n  Make it readable, or {_USE_ANOTHER}"
        )
        return _unavailable(file, why, text)

    def _stored(self, data: bytes) -> list[CatalogEntry]:
        """The entries of the file that `apply` wrote."""
        try:
            stored = _decode(data)
            if stored.gpu_console_catalog > VERSION:
                raise _unavailable(
                    self.file,
                    "newer",
                    f"a newer gpu-console wrote the catalogue {self.file}.\n"
                    f"  Upgrade this environment, or {_USE_ANOTHER}",
                )
            file = str(self.file)
            entries = [CatalogEntry(body["metadata"]["name"], body, file) for body in stored.models]
            for entry in entries:
                spec_of(entry, self.settings)  # raises if the entry is damaged
            return entries
        except _NOT_READABLE as error:
            raise _Damaged(
                f"the catalogue {self.file} is damaged ({first_line(error)}).\n"
                f"  Apply your files again:  gpu apply -f FILE      "
                f"(this sets the damaged file aside, and loses nothing in it)",
                path=str(self.file),
                why="damaged",
            ) from error

    # -- writing

    @checked
    def apply(self, *files: str | os.PathLike[str]) -> Applied:
        """Adds or changes all models of the `files`, or none of them. Returns what was changed.

        Raises BadDocument with the file, line and field of a mistake, also if two files have the
        same model, and CatalogUnavailable.
        """
        from . import documents

        new: list[CatalogEntry] = []
        names: dict[str, str] = {}  # of each model, the name of its file
        for file in files:
            name, data, base = _open_given(file)
            for manifest in manifests(documents.read(data, name), name):
                entry = _entry(manifest, self.file, base)
                if entry.name in names:
                    raise BadDocument(name, 0, entry.name, f"it is in {names[entry.name]} already")
                names[entry.name] = name
                new.append(entry)
        with self._locked():
            known, set_aside = self._for_writing()
            self._require_ours(new, known)
            ours = {name: entry for name, entry in known.items() if entry.file == str(self.file)}
            added = tuple(entry.name for entry in new if entry.name not in ours)
            kept = [entry for entry in new if entry.name in ours]
            changed = tuple(entry.name for entry in kept if ours[entry.name].body != entry.body)
            if added or changed:
                self._write({**ours, **{entry.name: entry for entry in new}}.values())
        unchanged = tuple(entry.name for entry in new if entry.name not in (*added, *changed))
        name = ", ".join(dict.fromkeys(names.values()))
        return Applied(name, added, changed, unchanged, tuple(self._notes(new, set_aside)))

    def _notes(self, new: Iterable[CatalogEntry], set_aside: str) -> Iterator[str]:
        """The notes on new entries. A note that applies to several entries appears once."""
        if set_aside:
            yield f"the catalogue was damaged; its content is in {set_aside}"
        names_of: dict[str, list[str]] = {}
        for entry in new:
            for note in notes(entry, self.settings):
                names_of.setdefault(note, []).append(entry.name)
        for note, names in names_of.items():
            yield f"{', '.join(names)}: {note}"

    def delete(self, name: str) -> CatalogEntry:
        """Removes the model `name`, and returns its entry. Raises UnknownModel, BadDocument and CatalogUnavailable."""
        with self._locked():
            entry = self._require(name)
            if entry.file != str(self.file) or self._by_hand():
                raise _by_hand(entry, "Remove")
            others = [other for other in self.entries().values() if other.name != entry.name]
            self._write(other for other in others if other.file == str(self.file))
        return entry

    def _locked(self) -> BinaryIO:
        """The locked lock file of the catalogue. Raises CatalogUnavailable after PATIENCE_SECONDS."""
        lock = self.directory / f"{self.file.stem}.lock"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            make_directory(self.directory)
            mode = self.directory.stat().st_mode & 0o666  # users who may write here may lock
            file = open(os.open(lock, flags, mode), "rb+")
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            if os.fstat(file.fileno()).st_uid == os.geteuid():
                os.fchmod(file.fileno(), mode)  # with more rights than the umask leaves
            lock_within(file.fileno(), PATIENCE_SECONDS)
        except BlockingIOError:
            file.close()
            raise _unavailable(
                self.file,
                "locked",
                f"another process has been writing the catalogue {self.file} for "
                f"{PATIENCE_SECONDS:.0f} s; perhaps it is stopped.\n  See who:  fuser -v {lock}",
            ) from None
        return file

    def _for_writing(self) -> tuple[Mapping[str, CatalogEntry], str]:
        """Renames a damaged file. Returns the entries, and the file's new name (or "")."""
        try:
            return self.entries(), ""
        except _Damaged:
            aside = _free_name(self.file.with_suffix(".damaged"))
            os.replace(self.file, aside)
            return self.entries(), str(aside)

    def _by_hand(self) -> bool:
        """Whether a person wrote the file to which `apply` would write."""
        data = None if self.file.name == OURS else self._bytes(self.file)
        return data is not None and not _is_ours(data)

    def _require_ours(self, new: Iterable[CatalogEntry], known: Mapping[str, CatalogEntry]) -> None:
        """Raises CatalogUnavailable if a person wrote `self.file` or the file of a `new` model."""
        if self._by_hand():
            raise _unavailable(
                self.file,
                "by hand",
                f"the catalogue {self.file} was written by hand, and is not overwritten.\n"
                f"  Add to it there, or use a directory:  GPU_CATALOG=DIRECTORY",
            )
        for entry in new:
            before = known.get(entry.name)
            if before is not None and before.file != str(self.file):
                raise _by_hand(before, "Change")

    def _write(self, entries: Iterable[CatalogEntry]) -> None:
        """Replaces the whole file at once, on the disk. Who may read the directory may read a new file."""
        bodies = [entry.body for entry in sorted(entries, key=lambda entry: entry.name)]
        stored = {"gpu_console_catalog": VERSION, "models": bodies}
        data = json.dumps(stored, indent=1, ensure_ascii=False).encode()

        def prepare(draft: Path) -> None:
            old, most = (self.file, 0o777) if self.file.exists() else (self.directory, 0o644)
            draft.chmod(old.stat().st_mode & most)
            _sync(draft)

        try:
            replace_file(self.file, data, prepare)
            _sync(self.directory)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> CatalogUnavailable:
        why = error.strerror or str(error)
        return _unavailable(
            self.file,
            why,
            f"the catalogue {self.file} cannot be written ({why}); it is unchanged.\n"
            f"  Make it writable, or {_USE_ANOTHER}",
        )


class _Damaged(CatalogUnavailable):
    """Raised when the file that `apply` wrote cannot be read."""


def _unavailable(file: Path | str, why: str, text: str) -> CatalogUnavailable:
    return CatalogUnavailable(text, path=str(file), why=why)


def _by_hand(entry: CatalogEntry, advice: str) -> CatalogUnavailable:
    text = f"{entry.name} is in {entry.file}, which was written by hand.\n  {advice} it there."
    return _unavailable(entry.file, "by hand", text)


class Catalogued:
    """The models of a `catalog`, with the ids of this machine's cards.

    If the catalogue cannot be read, only requests for its models fail. Models that this process has
    registered or loaded are not affected.
    """

    def __init__(self, catalog: Catalog, devices: Callable[[], tuple[Device, ...]]) -> None:
        """Reads the `catalog`. `devices` returns the devices of this machine."""
        self.catalog = catalog
        self._devices = devices
        self._logged = ""

    @property
    def _cards(self) -> list[Device]:
        return [device for device in self._devices() if not device.is_host]

    def spec(self, name: str) -> ModelSpec | None:
        """The model called `name`, with the device ids of this machine's cards; None if unknown.

        Raises CatalogUnavailable and BadDocument. Raises UnknownDevice if the model names a card
        that this machine does not have.
        """
        spec = self.catalog.spec(name)
        return self._here(spec) if spec else None

    def specs(self) -> tuple[ModelSpec, ...]:
        """All models of the catalogue, with cards as the catalogue's files name them.

        Empty if it cannot be read. Then the error is logged, but not twice in a row.
        """
        try:
            return self.catalog.specs()
        except (CatalogUnavailable, BadDocument) as error:
            if str(error) != self._logged:
                self._logged = str(error)
                log.warning("%s", error)
            return ()

    def names(self) -> tuple[str, ...]:
        """The names of all models."""
        return tuple(spec.name for spec in self.specs())

    def _here(self, spec: ModelSpec) -> ModelSpec:
        """The `spec`, in which each card is named by its device id.

        If one limit of bytes holds for every card, the result names each card with this limit.
        """
        placement: dict[str, Any] = dict(spec.placement)
        most = placement.get("card_bytes")
        if isinstance(most, dict):
            placement["card_bytes"] = {self._card(card): size for card, size in most.items()}
        elif most is not None:
            placement["card_bytes"] = {card.id: most for card in self._cards}
        return replace(spec, devices=tuple(map(self._card, spec.devices)), placement=placement)

    def _card(self, given: str) -> str:
        """The id of the card that `given` names by its index, id or UUID. Raises UnknownDevice."""
        for card in self._cards:
            if given in (str(card.index), card.id, card.uuid):
                return card.id
        raise UnknownDevice(given, tuple(card.id for card in self._cards))


# -- text and files ------------------------------------------------------------------------------


def _open_given(file: str | os.PathLike[str]) -> tuple[str, bytes, str]:
    """The name of `file`, its bytes, and the directory for the relative paths in it.

    `-` is standard input. Raises BadDocument if the file cannot be read.
    """
    from .documents import MOST_BYTES

    name = os.fspath(file)
    try:
        if name == "-":
            return "standard input", sys.stdin.buffer.read(MOST_BYTES + 1), os.getcwd()
        path = Path(os.path.expanduser(name))
        with open(path, "rb") as opened:
            return name, opened.read(MOST_BYTES + 1), str(path.absolute().parent)
    except (OSError, ValueError) as error:  # a null byte in the name is a ValueError
        why = getattr(error, "strerror", "") or error
        raise BadDocument(name, 0, "", f"it cannot be read ({why})") from None


def _entry(manifest: Manifest, file: Path, base: str = "") -> CatalogEntry:
    """The entry of `manifest` for the catalogue's `file`, with absolute paths.

    Relative paths begin at the directory `base`, by default the directory of `file`.
    """
    spec = dict(manifest.body["spec"])
    base = base or str(file.parent)
    if spec.get("path"):
        spec["path"] = absolute(spec["path"], base)
    template = spec.get("chat_template")
    if template and "{" not in template:
        spec["chat_template"] = absolute(template, base)
    source = spec.get("source")
    if source and (source[0] in ".~" or os.path.exists(absolute(source, base))):
        spec["source"] = absolute(source, base)
    return CatalogEntry(manifest.name, {**manifest.body, "spec": spec}, str(file))


def absolute(path: str, base: str) -> str:
    """`path` itself if it is absolute. If not, `path` below the directory `base`.

    >>> absolute("phi/../phi-4.gguf", "/srv/models"), absolute("/data/phi", "/srv/models")
    ('/srv/models/phi-4.gguf', '/data/phi')
    """
    return os.path.normpath(os.path.join(base, os.path.expanduser(path)))


def _is_ours(data: bytes) -> bool:
    return b'"gpu_console_catalog"' in data[:200]


def _free_name(path: Path) -> Path:
    """The first of `path-1`, `path-2`, … that does not exist."""
    names = (path.with_name(f"{path.name}-{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def _sync(path: Path) -> None:
    """Writes the new content of the file or directory `path` to the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


# -- the three formats ---------------------------------------------------------------------------

API_VERSION = "model.aispec.org/v1alpha1"
KINDS = ("Model", "Agent", "AIApp")
_EXAMPLE = f"a document with apiVersion {API_VERSION}, or an entry under `models:`"


class Manifest(NamedTuple):
    """One model of a file, converted to the first format, and its place in the file."""

    name: str
    body: dict[str, Any]  # apiVersion, kind, metadata, spec
    document: Document
    path: Place  # path of the model's spec in the document

    def wrong(self, problem: str, *path: str | int) -> BadDocument:
        """The error for a `problem` at this `path`, which begins at the manifest's spec."""
        return self.document.wrong((*self.path, *path), problem)


Found = Manifest | BadDocument  # a model, or the error if it cannot be read


def manifests(documents: tuple[Document, ...], file: str) -> tuple[Manifest, ...]:
    """Every model of the `documents` of a `file`, of which there must be one, with checked fields.

    Raises BadDocument with all errors, in the order of their lines.
    """
    every: list[Found] = []
    for document in documents:
        value = document.value
        parts = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, part in parts:
            every += _in_value(document, part, () if index is None else (index,))
    found = [result for result in every if isinstance(result, Manifest)]
    errors = [result for result in every if isinstance(result, BadDocument)]
    if not found and not errors:
        raise BadDocument(file, 1, "", f"there is no model in it. A model is {_EXAMPLE}")
    for manifest in found:
        found_wrong = problems(manifest.body["spec"])
        errors += [manifest.wrong(problem, field) for field, problem in found_wrong]
    errors += _repeated(found)
    if errors:
        raise BadDocument.of(sorted(errors, key=lambda error: error.line))
    return tuple(found)


def _repeated(found: list[Manifest]) -> Iterator[BadDocument]:
    """An error for each model that has the same name as an earlier model of the file."""
    first: dict[str, Manifest] = {}
    for manifest in found:
        before = first.setdefault(manifest.name, manifest)
        if before is not manifest:
            line = before.document.line(before.path)
            yield manifest.wrong(
                f"{manifest.name!r} appears twice in this file; the first time in line {line}"
            )


def _in_value(document: Document, value: Any, path: Place) -> Iterator[Found]:
    if not isinstance(value, dict):
        yield document.wrong(path, f"this is no model. A model is {_EXAMPLE}")
    elif "apiVersion" in value or "kind" in value:
        field, problem = _resource_problem(value)
        if problem:
            yield document.wrong((*path, *field), problem)
        else:
            yield Manifest(value["metadata"]["name"], value, document, (*path, "spec"))
    elif "models" in value:
        yield from _in_list(document, value, path)
    elif {"name", "id"} & value.keys():
        yield _named(document, value, path)
    else:
        close = difflib.get_close_matches("models", value, n=1, cutoff=0.7)
        hint = f" Did you mean models, in place of {close[0]}?" if close else ""
        yield document.wrong(path, f"this is no model: it has no name.{hint} A model is {_EXAMPLE}")


def _resource_problem(value: dict[str, Any]) -> tuple[Place, str]:
    """The path of the first wrong field in `value`, a document of the first format, and the problem.

    The fields inside its spec are not checked here.
    """
    if value.get("apiVersion") != API_VERSION:
        version = value.get("apiVersion")
        problem = "it is missing" if version is None else f"{quoted(version)} is not supported"
        return ("apiVersion",), f"{problem}; it must be {API_VERSION}"
    if value.get("kind") not in KINDS:
        return ("kind",), (
            f"{quoted(value.get('kind'))} is not supported; it must be {', '.join(KINDS[:-1])} "
            f"or {KINDS[-1]}"
        )
    metadata = value.get("metadata")
    if not isinstance(metadata, dict) or "name" not in metadata:
        return ("metadata",), "the name is missing; write  metadata: {name: NAME}"
    problem = bad_name(metadata["name"])
    if problem:
        return ("metadata", "name"), problem
    if not isinstance(value.get("spec"), dict):
        return ("spec",), "it must be a mapping of fields"
    return (), ""


def _in_list(document: Document, value: dict[str, Any], path: Place) -> Iterator[Found]:
    """The models under `models:`, which contains a mapping from names to fields, or a list."""
    for other in value.keys() - {"models"}:
        yield document.wrong(
            (*path, other),
            "only `models` is read here; put this in a document of its own (a line ---), or remove "
            "it",
        )
    listed = value["models"]
    if isinstance(listed, list):
        for index, part in enumerate(listed):
            yield _named(document, part, (*path, "models", index))
    elif isinstance(listed, dict):
        for name, part in listed.items():
            place = (*path, "models", name)
            problem = bad_name(name)
            if not problem and not isinstance(part, dict):
                problem = "it must be a mapping of fields, such as  {path: FILE}"
            yield document.wrong(place, problem) if problem else _model(document, name, part, place)
    else:
        yield document.wrong((*path, "models"), "it must be a mapping of names, or a list")


def _named(document: Document, part: Any, path: Place) -> Found:
    """The model in the mapping `part`. Its name is `name`, or `id` if `name` is missing."""
    if not isinstance(part, dict):
        return document.wrong(path, "it must be a mapping of fields, with a name")
    key = "name" if "name" in part else "id"
    if key not in part:
        return document.wrong(path, "its name is missing; write  name: NAME")
    name = part[key]
    problem = bad_name(name)
    if problem:
        return document.wrong((*path, key), problem)
    spec = {field: value for field, value in part.items() if field != "name"}
    return _model(document, name, spec, path)


def _model(document: Document, name: str, spec: dict[str, Any], path: Place) -> Manifest:
    body = {"apiVersion": API_VERSION, "kind": KINDS[0], "metadata": {"name": name}, "spec": spec}
    return Manifest(name, body, document, path)
