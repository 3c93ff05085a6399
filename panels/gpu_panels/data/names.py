"""Names of processes, the same for every viewer of the page.

`rendering.views.holder` returns "this process" for the current process. On a served page, the current
process would be the server.
"""

from __future__ import annotations

from gpu_runtime.facts import Section, holder_label
from gpu_runtime.rendering.views import clean

KERNEL = "kernel"  # the name and the kind of the lease of a notebook's own code


def notebook_name(section: Section) -> str:
    """The process of `section`: `train.ipynb`, or `pid 4121` if it has no notebook."""
    owner = section.owner
    return clean(owner.file) if owner.notebook else f"pid {owner.pid}"


def process_name(section: Section) -> str:
    """The process of `section`: `train.ipynb (pid 4121), ann`."""
    return clean(holder_label(section.owner))
