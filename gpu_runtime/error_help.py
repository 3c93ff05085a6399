"""What to do about each error. The last line of an error in a notebook names the error's page.

`%gpu help DoesNotFit` shows the text for the error DoesNotFit. `docs/reference/errors.md` has the
same texts.
"""

from __future__ import annotations

import inspect

from . import errors

WHAT_TO_DO = {  # error -> what to type or to change
    "GpuError": "catch this class to catch every error of this page",
    "DoesNotFit": "`%gpu plan NAME` shows the figures",
    "MemoryLimitExceeded": "`%gpu evict OTHER`, or raise the limit",
    "Busy": "wait longer (`timeout`), or interrupt the cells that `%gpu status` names",
    "WaitEnded": "run the cell again to wait again; the message names the person who ended the wait",
    "Deadlock": "use one model at a time, or all in one order",
    "OutOfMemory": "what the lines below the error say: run the cell again, or smaller batches",
    "StillInUse": "it leaves when the cell that uses it ends; a pinned one after `%gpu unpin NAME`",
    "NotAllowed": "ask the operator, or the model's owner",
    "NotResident": "call the model inside `with rt.use(NAME)`",
    "NotLoaded": "load it in a notebook: `%gpu load NAME`",
    "ModelDisabled": "set `enabled: true` and apply the file again",
    "UnknownModel": "`%gpu load NAME PATH`",
    "UnknownVerb": "`%gpu help` lists the verbs",
    "UnknownDevice": "`%gpu status` lists the devices",
    "NeedsWith": "write `with rt.use(NAME) as model:`",
    "AmbiguousName": "name the process too, as in `NAME@PID`",
    "AlreadyRegistered": "`rt.forget(NAME)`, or another name",
    "BadSize": "write `8 GiB`, `10GB` or bytes",
    "UnknownSize": "pass `size=`",
    "BadSetting": "the message shows what is expected",
    "BadDocument": "correct the line that the message names",
    "FleetUnavailable": "the message says what is missing: the extra, a cluster, a token, equal versions or a card",
    "NodeLost": "use the model again, or pass `retry=True` to `fleet.use`",
    "LoadFailed": "check the path",
    "NotAModel": "check the path: `config.json` and `*.safetensors`",
    "CannotGovern": "adopt the module before it is wrapped",
    "BadCall": "correct the arguments",
    "EngineDied": "use the model again; read the log that the message names",
    "EngineFault": "use the model again; read the log that the message names",
    "ProcessLost": "restart the kernel",
    "ProbeFailed": "`gpu doctor`; check the driver",
    "LedgerUnavailable": "check the disk of the path that the message names",
    "LedgerNewer": "upgrade, or use another ledger",
    "LedgerRefused": "report it: a write broke a law, and the book is unchanged",
    "CatalogUnavailable": "check the path that the message names",
}


def page(name: str, prompt: str) -> str:
    """The page of the error `name`: what it means, its attributes, and what to do.

    The page is empty if no error has this name. Commands in the page begin with `prompt`.
    """
    kind = getattr(errors, name, None) if name in WHAT_TO_DO else None
    if kind is None:
        return ""
    meaning = " ".join((inspect.getdoc(kind) or "").split())
    told = WHAT_TO_DO[name].replace("`", "").replace("%gpu", prompt)
    return (
        f"{name}\n  {meaning}\n  What to do: {told}\n"
        "  Examples: docs/guides/troubleshooting.md, and runbook 13_troubleshooting"
    )
