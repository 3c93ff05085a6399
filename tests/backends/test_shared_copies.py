"""Copies that a user's processes share: files are read once, weights are right, no other user's pages are used."""

import gc
import os
import shutil
import subprocess
import sys

import msgspec
import pytest
import torch

from gpu_runtime.backends.pytorch import shadows, storages, transformers_backend
from gpu_runtime.backends.pytorch.transformers_backend import TransformersBackend
from gpu_runtime.devices import process_memory
from gpu_runtime.devices.probe import open_probe
from gpu_runtime.devices.process_memory import SharedPages, held_by
from gpu_runtime.facts import HOST, ModelSpec, Share
from tests import simgpu
from tests.backends.test_shadows import content, move, same
from tests.page_rights import writable

CARD = "sim:0"
ME = (os.getpid(),)
EARLIER: set[int] = set()


def mine():
    """The shared pages that this process has opened since the test began."""
    return [pages for pages in held_by(ME) if pages.inode not in EARLIER]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Lets models of some hundred KiB be shared. Pages that an earlier test holds do not count."""
    monkeypatch.setattr(shadows, "LEAST_BYTES", 1)
    gc.collect()
    monkeypatch.setattr(sys.modules[__name__], "EARLIER", {one.inode for one in held_by(ME)})


def kernel(llama, copies=ME, **options):
    """A model as another process would have it: with devices and pages of its own."""
    probe = open_probe("sim:1GiB,host:1GiB")
    backend = TransformersBackend(probe)
    spec = ModelSpec("llama", backend="transformers", source=str(llama), options=options)
    return backend, backend.load(spec, (Share(CARD, 0),), shadow=True, copies=copies)


def files():
    """The inodes of the shared pages that this process has open, each once."""
    return {pages.inode for pages in mine()}


def test_a_second_load_uses_the_pages_of_the_first(llama, monkeypatch):
    first, one = kernel(llama)
    assert len(files()) == 1
    monkeypatch.setattr(SharedPages, "create", lambda size: pytest.fail("new pages"))
    second, other = kernel(llama)
    same(content(one), content(other))
    assert len(files()) == 1
    assert other.shadow_bytes == one.shadow_bytes > 0
    for backend, model in ((second, other), (first, one)):
        before = content(model)
        move(backend, model, HOST)
        move(backend, model, CARD)
        same(content(model), before)
    second.drop(other)
    first.drop(one)


def test_the_pages_are_freed_with_the_last_holder(llama):
    first, one = kernel(llama)
    second, other = kernel(llama)
    first.drop(one)
    del one
    gc.collect()
    before = content(other)
    move(second, other, HOST)  # the pages stay for the second one
    assert len(files()) == 1
    move(second, other, CARD)
    same(content(other), before)
    second.drop(other)
    del other
    gc.collect()
    assert files() == set()


def test_what_one_user_of_the_pages_writes_no_other_one_sees(llama):
    """Weights in host memory refuse writes. After the return they are the process's own."""
    first, one = kernel(llama)
    second, other = kernel(llama)
    before = content(other)
    move(first, one, HOST)
    move(second, other, HOST)
    for parameter in one.module.parameters():
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            parameter.data.zero_()
    same(content(one), before)
    move(first, one, CARD)
    for parameter in one.module.parameters():
        parameter.data.zero_()
    same(content(other), before)
    third, more = kernel(llama)
    same(content(more), before)
    move(second, other, CARD)
    same(content(other), before)


@pytest.mark.parametrize("kind", ["weight", "inv_freq"])
def test_torn_pages_are_not_used(llama, kind):
    """The bytes of a weight are torn, or those of a buffer that the model's files do not have."""
    first, one = kernel(llama)
    before = content(one)
    [pages] = mine()[:1]
    torn = [stored for stored in stored_in(pages) if stored.tensors[0][0].endswith(kind)]
    pages.write(torn[0].at, memoryview(b"torn"))
    second, other = kernel(llama)
    same(content(other), before)
    assert other.shadow_bytes  # a private copy
    assert len(files()) == 1


@pytest.fixture
def compared(monkeypatch):
    """The sizes of the storages whose digests the test has computed."""
    sizes = []
    real = transformers_backend.digest

    def digest(content):
        sizes.append(content.numel())
        return real(content)

    monkeypatch.setattr(transformers_backend, "digest", digest)
    return sizes


def test_pages_that_nobody_wrote_since_are_used_without_a_digest(llama, compared):
    first, one = kernel(llama)
    compared.clear()
    second, other = kernel(llama)
    assert compared == []
    assert other.part is not None
    same(content(one), content(other))
    assert digests(other) == digests(one)
    assert second.unchanged(other)
    next(other.module.parameters()).data.view(-1)[0] += 1
    assert not second.unchanged(other)


def digests(model):
    return {layout: digest.tolist() for layout, digest in model.given.items()}


def test_without_a_copy_of_its_own_in_host_memory_the_weights_are_compared(llama, compared):
    """The weights go from the pages to the card. What the process built itself is not in the pages."""
    first, one = kernel(llama)
    compared.clear()
    second = TransformersBackend(open_probe("sim:1GiB,host:1GiB"))
    other = second.load(one.spec, (Share(CARD, 0),), copies=ME)
    assert sum(compared) == one.shadow_bytes
    same(content(one), content(other))


def test_a_storage_without_bytes_has_a_digest_too(llama):
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.empty(0))])
    [group] = storages.grouped(storages.slots(module))
    stored = shadows._Stored(shadows._key(group.layout), 0, 0, b"", ())
    pages = SharedPages.create(4096)
    pages.seal()
    copy = shadows.SharedCopy(pages, "files", (stored,))
    copy.tensors([group], [group.bytes], open_probe("sim:1GiB,host:1GiB").place(HOST), None)
    [found] = copy.proven([group]).values()
    assert torch.equal(found, shadows.digest(group.bytes))


@pytest.mark.parametrize("touch", ["same bytes", "card"])
def test_pages_that_somebody_could_have_written_are_compared(llama, compared, touch):
    """A write of the same bytes counts too, and so does a mapping that can be written."""
    first, one = kernel(llama)
    [pages] = mine()[:1]
    if touch == "card":
        host = open_probe("sim:1GiB,host:1GiB").place(HOST)
        host.pinned = True
        pages.blocks(host, [(0, 4096)])
    else:
        pages.write(0, memoryview(pages.read(0, 4096)))
    compared.clear()
    second, other = kernel(llama)
    assert sum(compared) == other.shadow_bytes
    assert len(files()) == 1
    same(content(one), content(other))


def test_a_write_during_the_second_load_is_noticed(llama, monkeypatch):
    """The pages are torn after they were found and before their bytes are on the card."""
    first, one = kernel(llama)
    before = content(one)
    real = shadows.SharedCopy.tensors

    def tensors(self, *given):
        if not self.is_new:
            [stored, *_] = self.index.values()
            self.pages.write(stored.at, memoryview(b"torn"))
        return real(self, *given)

    monkeypatch.setattr(shadows.SharedCopy, "tensors", tensors)
    second, other = kernel(llama)
    same(content(other), before)
    assert other.part is None


def test_the_process_that_writes_the_pages_does_not_read_them_again(llama, monkeypatch):
    monkeypatch.setattr(torch, "equal", lambda *tensors: pytest.fail("compared"))
    kernel(llama)


def test_a_buffer_that_is_built_with_other_bytes_is_not_replaced(llama, monkeypatch):
    """The second process computes a buffer that no file has, in another way than the first one."""
    first, one = kernel(llama)
    real = transformers_backend.built_from

    def built(*given):
        module = real(*given)
        module.model.rotary_emb.inv_freq.mul_(2)
        return module

    monkeypatch.setattr(transformers_backend, "built_from", built)
    second, other = kernel(llama)
    same(content(other), content(one))  # from the files
    assert other.part is None


def test_tied_weights_share_one_storage_in_the_second_process_too(llama, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(llama, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tied")
    first, one = kernel(tmp_path / "tied")
    second, other = kernel(tmp_path / "tied")
    assert other.part is not None
    same(content(one), content(other))
    head, embeddings = other.module.lm_head.weight, other.module.model.embed_tokens.weight
    assert head.untyped_storage()._cdata == embeddings.untyped_storage()._cdata
    assert other.shadow_bytes == one.shadow_bytes


def stored_in(pages):
    shelf = shadows.SharedCopy.found(ME, content_of(pages))
    return shelf.index.values()


def content_of(pages):
    page = pages.read(0, shadows.PAGE_BYTES).rstrip(b"\0")
    return msgspec.msgpack.decode(page, type=shadows._First).content


def files_touched(patch, directory):
    for file in directory.glob("*.safetensors"):
        os.utime(file)


def other_version(patch, directory):
    patch.setattr(shadows, "version", lambda name: "0.0")


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (files_touched, {}),
        (other_version, {}),  # of transformers, which built the module
        (lambda *_: None, {"dtype": "bfloat16"}),
    ],
    ids=["files", "version", "dtype"],
)
def test_another_model_has_pages_of_its_own(llama, tmp_path, monkeypatch, change, options):
    llama = shutil.copytree(llama, tmp_path / "copy")
    first, one = kernel(llama)
    change(monkeypatch, llama)
    second, other = kernel(llama, **options)
    assert len(files()) == 2
    if options:
        assert next(other.module.parameters()).dtype == torch.bfloat16
    else:
        same(content(one), content(other))


def test_pages_that_were_not_completed_are_not_used(llama, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shadows.SharedCopy, "complete", lambda self, given: None)
        first, one = kernel(llama)
    second, other = kernel(llama)
    same(content(one), content(other))
    assert len(files()) == 2


@pytest.mark.parametrize("index", [b"", b"\xc1", b"\x91\x01"])
def test_a_damaged_index_is_as_no_copy(llama, index):
    first, one = kernel(llama)
    [pages] = mine()[:1]
    page = pages.read(0, shadows.PAGE_BYTES)
    pages.write(0, memoryview(index + page[len(index) :] if index else bytes(len(page))))
    second, other = kernel(llama)
    same(content(one), content(other))


@pytest.mark.parametrize(
    "opened",
    [
        pytest.param(
            lambda file: os.fchown(file, 12345, 12345),
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away"),
            id="of another user",
        ),
        pytest.param(lambda file: os.fchmod(file, 0o644), id="readable by others"),
    ],
)
def test_pages_that_another_user_has_or_may_open_are_not_used(llama, opened):
    first, one = kernel(llama)
    before = content(one)
    found = mine()
    assert {os.fstat(pages.file).st_mode & 0o777 for pages in found} == {0o600}
    for pages in found:
        opened(pages.file)
    assert mine() == []
    second, other = kernel(llama)
    same(content(other), before)
    assert len(files()) == 1


@pytest.mark.parametrize("where", ["/proc/no/such", "full"])
def test_without_room_in_dev_shm_the_copy_is_private(llama, monkeypatch, where):
    if where == "full":

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(process_memory.os, "posix_fallocate", full)
    else:
        monkeypatch.setattr(process_memory, "DIRECTORY", where)
    backend, model = kernel(llama)
    assert model.shadow_bytes and files() == set()
    before = content(model)
    move(backend, model, HOST)
    move(backend, model, CARD)
    same(content(model), before)


def test_a_full_dev_shm_is_noticed_before_a_page_is_written():
    assert SharedPages.create(1 << 50) is None
    assert files() == set()


KERNEL = """
import os, sys, torch
from gpu_runtime.backends.pytorch import shadows
from gpu_runtime.backends.pytorch.transformers_backend import TransformersBackend
from gpu_runtime.devices.probe import open_probe
from gpu_runtime.facts import ModelSpec, Share
shadows.LEAST_BYTES = 1
backend = TransformersBackend(open_probe("sim:1GiB,host:1GiB"))
spec = ModelSpec("llama", backend="transformers", source=sys.argv[1])
pids = [int(pid) for pid in sys.argv[2:]]
model = backend.load(spec, (Share("sim:0", 0),), shadow=True, copies=pids)
total = sum(p.double().sum().item() for p in model.module.parameters())
pages = next(shadows.held_by([os.getpid()]))
print(os.fstat(pages.file).st_ino, total, flush=True)
sys.stdin.readline()
"""


@pytest.mark.processes
def test_a_killed_holder_leaves_the_pages_to_the_other_and_nothing_behind(llama):
    """First the process that made the pages is killed, then the process that found and used them."""

    def start(*pids):
        words = [sys.executable, "-c", KERNEL, str(llama), *map(str, pids)]
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        return process, process.stdout.readline().split()

    def end(process):
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()

    first, (pages, total) = start()
    second, (its_pages, its_total) = start(first.pid)
    assert (its_pages, its_total) == (pages, total)
    end(first)
    third, (its_pages, its_total) = start(first.pid, second.pid)
    assert (its_pages, its_total) == (pages, total)
    end(second)
    end(third)
    assert not any(
        os.fstat(found.file).st_ino == int(pages)
        for pid in os.listdir("/proc")
        if pid.isdecimal()
        for found in held_by([int(pid)])
    )


def test_the_first_page_is_read_if_the_size_of_its_index_ends_in_a_zero():
    """The zeros after the page's content are cut off. Numbers in the page may end in zeros, too."""
    stored = shadows._Stored("", 0, 0, b"", ())
    spare = 512 - 2 - len(msgspec.msgpack.encode([stored]))
    index = msgspec.msgpack.encode([msgspec.structs.replace(stored, layout="k" * spare)])
    assert len(index) == 512
    pages = SharedPages.create(2 * 4096)
    pages.write(4096, memoryview(index))
    first = shadows._First(shadows.MAGIC, 4096, len(index), "files")
    pages.write(0, memoryview(msgspec.msgpack.encode(first)))
    assert len(shadows._read(pages, "files")) == 1


def test_a_changed_model_that_is_released_in_host_memory_can_be_written(llama, guards):
    """A write into the shared read-only pages would end the process, and its user may train on the CPU."""
    probe = simgpu.SimProbe()
    probe.place(HOST).pinned = True
    backend = TransformersBackend(probe)
    spec = ModelSpec("llama", backend="transformers", source=str(llama))
    model = backend.load(spec, (Share("simgpu:0", 0),), shadow=True, copies=())
    module = backend.value(model)
    with torch.no_grad():
        module.lm_head.weight[0, 0] += 1
    before = {name: weight.detach().cpu() for name, weight in module.named_parameters()}
    move(backend, model, HOST)
    assert not writable(next(iter(model.away.values())).data_ptr())
    backend.drop(model)
    assert all(writable(weight.data_ptr()) for weight in module.parameters())
    same(dict(module.named_parameters()), before)
