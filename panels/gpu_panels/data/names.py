"""Names of processes. Every viewer of the page gets the same names.

`rendering.views.holder` returns "this process" for the current process. On a served page, this would be the server.
"""

from __future__ import annotations

from gpu_runtime.facts import Section, holder_label
from gpu_runtime.rendering.views import clean

KERNEL = "kernel"  # the name and the kind of the lease of a notebook's own code


def notebook_name(section: Section) -> str:
    """The name of the process of `section`: `train.ipynb`, or `pid 4121` if the process has no notebook."""
    owner = section.owner
    return clean(owner.file) if owner.notebook else f"pid {owner.pid}"


def process_name(section: Section) -> str:
    """The name of the process of `section`, such as `train.ipynb (pid 4121), ann`."""
    return clean(holder_label(section.owner))
