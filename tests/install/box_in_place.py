"""Installs the box at its real paths, runs kernels, and removes it. Prints what went wrong.

    python -m tests.install.box_in_place WHEELS PYTHON...

The process is root in a tree that nobody else uses: test_box.py runs it in namespaces of its own. Each
PYTHON is that of an environment that has only ipykernel.
"""

from __future__ import annotations

import grp
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from gpu_runtime import box, cli

from .boxes import BoxKernel

GROUP = "gpu"
ACCOUNTS = (
    "passwd",
    "shadow",
    "group",
    "gshadow",
    "subuid",
    "subgid",
)  # other tests make users meanwhile
FOLDERS = ("etc", "opt", "srv", "usr/bin", "usr/local", "usr/lib/systemd", "var/lib", "var/spool")


def state() -> dict[str, Any]:
    """Every path that the installation could have changed: its mode, and of a file its size and time."""
    found: dict[str, Any] = {}
    for folder in FOLDERS:
        for path in Path("/", folder).rglob("*"):
            if path.name.startswith(ACCOUNTS) and path.parent == Path("/etc"):
                continue
            try:
                known = path.lstat()
            except FileNotFoundError:  # of another program
                continue
            is_directory = path.is_dir() and not path.is_symlink()
            figures = () if is_directory else (known.st_size, known.st_mtime_ns)
            found[str(path)] = (known.st_mode, *figures)
    return found


def versions_of(pythons: list[str]) -> list[str]:
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    return [subprocess.check_output([one, "-c", program], text=True).strip() for one in pythons]


CONTAINED = """#!/bin/sh
exec {container} setpriv --reuid=65534 --regid=65534 --groups={gid} \\
    --inh-caps=+dac_read_search --ambient-caps=+dac_read_search {python} "$@"
"""
# Their processes have numbers of their own. In bubblewrap nothing but the mounts of the page and the kernel's own
# directories can be written, and the rest of /var/lib is empty.
CONTAINERS = {
    "unshare": "--mount --pid --fork --kill-child --mount-proc --ipc --uts --net",
    "bwrap": "--ro-bind / / --proc /proc --dev /dev --tmpfs /var/lib --bind /var/lib/gpu-console /var/lib/gpu-console "
    "--perms 1777 --tmpfs /tmp --bind /tmp/home-of-nobody /tmp/home-of-nobody --bind $KERNEL_PLACE $KERNEL_PLACE "
    "--ro-bind {environment} {environment} --ro-bind {linked} {linked} "
    "--unshare-pid --unshare-ipc --unshare-uts --unshare-net --cap-add ALL",
}


def in_a_container(container: str, python: Path, command: str) -> None:
    """A kernel in namespaces of its own, of a user who has the group's number, shares the ledger."""
    program, home = Path("/tmp/contained"), Path("/tmp/home-of-nobody")
    words = f"{container} {CONTAINERS[container]}"
    words = words.format(environment=python.parents[1], linked=sys.prefix)  # see `environment`
    gid = grp.getgrnam(GROUP).gr_gid
    program.write_text(CONTAINED.format(container=words, gid=gid, python=python))
    program.chmod(0o755)
    home.mkdir(exist_ok=True)
    os.chown(home, 65534, 65534)
    own = {"HOME": str(home), "IPYTHONDIR": str(home / "ipython")}
    leases = [command, "leases"]
    devices = {"GPU_DEVICES": "sim:64MiB,host:1GiB"}
    with BoxKernel(python, Path("/"), program=program, user=65534, **own) as kernel:
        said = kernel.run("rt.register('boxed', backend='fake', size='1MiB'); rt.preload('boxed')")
        assert "boxed" in said, said
        held = subprocess.check_output(leases, env=devices, cwd="/", text=True)
        assert "boxed" in held and "nobody" in held, held
        # A change of the user ends what --kill-child has arranged.
        for process in psutil.Process(kernel.pid).children(recursive=True):
            process.kill()


def main(wheels: str, pythons: list[str]) -> None:
    subprocess.run(["groupadd", "-f", GROUP], check=True)
    before = state()
    box.EXTRAS = ""  # without the console
    versions = ",".join(versions_of(pythons))
    assert cli.main(["box", "install", "--from", wheels, "--pythons", versions]) == 0
    command = "/usr/local/bin/gpu"
    subprocess.run([command, "box"], check=True, env={}, cwd="/")
    for python in pythons:
        with BoxKernel(Path(python), Path("/")) as kernel:
            assert "healthy" in (said := kernel.run("%gpu health")), said
            assert "/opt/gpu-console/" in kernel.run("import gpu; gpu.__file__")
            assert "ModuleNotFoundError" in kernel.run("import yaml")
            assert kernel.log == []
            subprocess.run([command, "status"], check=True, env={}, cwd="/")
    for container in filter(shutil.which, CONTAINERS):
        in_a_container(container, Path(pythons[0]), command)
    subprocess.run([command, "box", "remove"], check=True, env={}, cwd="/")
    after = state()
    changed = {path for path in {*before, *after} if before.get(path) != after.get(path)}
    assert changed == set(), sorted(changed)[:20]
    print("all is as before")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
