"""Names of processes, and whether they can answer. Every viewer of the page gets the same words.

`rendering.views.holder` returns "this process" for the current process. On a served page, this would be the server.
"""

from __future__ import annotations

from gpu_runtime.facts import ProcessState, Section, Snapshot, holder_label
from gpu_runtime.rendering.views import clean


def notebook_name(section: Section) -> str:
    """The name of the process of `section`: `train.ipynb`, or `pid 4121` if the process has no notebook."""
    owner = section.owner
    return clean(owner.file) if owner.notebook else f"pid {owner.pid}"


def process_name(section: Section) -> str:
    """The name of the process of `section`, such as `train.ipynb (pid 4121), ann`."""
    return clean(holder_label(section.owner))


def why_no_answer(snapshot: Snapshot, owner_id: str) -> str:
    """Why the process with the id `owner_id` cannot act on a request, as a sentence; empty if it can."""
    presence = snapshot.presences.get(owner_id)
    return _NO_ANSWER.get(presence.state, "") if presence else ""


_NO_ANSWER = {
    ProcessState.STOPPED: "Its process is stopped, and acts on no request until it is continued",
    ProcessState.DUMPING: "Its process has crashed, and writes its core dump",
}
