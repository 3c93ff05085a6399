"""What can be used is documented: every public name, verb and setting stands in the README."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import gpu_runtime
from gpu_runtime.catalog.schema import Fields
from gpu_runtime.settings import Settings
from gpu_runtime.verbs import VERBS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def names_in(text: str) -> set[str]:
    """The names inside backticks and code blocks; prose does not document a name."""
    code = re.findall(r"```.*?```|`[^`\n]+`", text, flags=re.DOTALL)
    return set(re.findall(r"[A-Za-z_]\w*", " ".join(code)))


def undocumented(names: set[str], text: str) -> set[str]:
    return names - names_in(text)


def test_every_public_name_is_in_the_readme():
    """What is exported is promised."""
    public = set(gpu_runtime.__all__)
    assert undocumented(public, README) == set()


def test_every_verb_is_in_the_table_of_magics():
    """As `%gpu VERB`, in the README's table; as `gpu VERB`, where it works in a terminal only."""
    assert {
        verb.name
        for verb in VERBS.values()
        if not re.search(rf"^\|.*`{verb.places[0]} {verb.name}\b", README, flags=re.MULTILINE)
    } == set()


def test_every_setting_is_in_the_readme_with_its_default_and_meaning():
    """The same words as `gpu config` prints, so that neither can go stale."""
    rows = [f"| `{row.name}` | `{row.default}` | {row.doc} |" for row in Settings.load().sources()]
    assert [row for row in rows if row not in README.splitlines()] == []


def test_no_setting_is_documented_that_does_not_exist():
    """A setting that was removed leaves the README too."""
    documented = set(re.findall(r"^\| `([A-Z][A-Z_]+)` \|", README, flags=re.MULTILINE))
    assert documented == {row.name for row in Settings.load().sources()}


def test_every_field_of_the_catalogue_is_in_the_readme_with_its_meaning_and_no_other():
    """In the order and words of the table that checks them."""
    rows = re.findall(r"^\| `([a-z_]+)` \| (.*) \|$", README, flags=re.MULTILINE)
    assert rows == [(name, field.description) for name, field in Fields.model_fields.items()]


def test_the_examples_work(tmp_path):
    """Typed as they stand, on a card that holds one of the two models: the first steps aside to RAM and says why."""
    samples, example, *_ = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    settings = {"GPU_DEVICES": "sim:96MiB,host:8GiB", "GPU_LEDGER": f"sqlite://{tmp_path}/ledger"}
    shown = subprocess.run(
        [sys.executable, "-c", samples + example],
        cwd=tmp_path,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert re.search(
        r"^offloaded - ranker needs .*; writer was idle", shown.stdout, flags=re.MULTILINE
    )


def test_every_link_in_the_readme_leads_somewhere():
    """To a section of this page, or a file of this repository."""
    sections = {
        re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", README, flags=re.MULTILINE)
    }
    targets = re.findall(r"\]\(([^)\s]+)\)", README)
    broken = [
        target
        for target in targets
        if not target.startswith("http")
        and not (target[1:] in sections if target.startswith("#") else (ROOT / target).exists())
    ]
    assert targets and broken == []


def test_a_missing_name_is_noticed():
    """This file can fail: prose and longer names do not count."""
    assert undocumented({"use", "lease"}, "Please use `rt.lease_all()`.") == {"use", "lease"}
    assert undocumented({"use", "lease"}, "```\nrt.use(name)\n```\nand `rt.lease`") == set()
