"""The catalogue's entries, read by several threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpu_runtime.catalog.store import Catalog
from gpu_runtime.settings import Settings


class ReadByTwo(Catalog):
    """A second thread, which read the files before the last change, always stores its entries last."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value if name != "_known" else (None, {}))


def test_a_slower_reader_does_not_replace_the_entries_of_a_faster_one(tmp_path: Path) -> None:
    (tmp_path / "fleet.json").write_text(
        '{"apiVersion": "model.aispec.org/v1alpha1", "kind": "Model", "metadata": {"name": "small"},'
        ' "spec": {"runtime": "fake", "memory": "4GiB"}}'
    )
    catalog = ReadByTwo(Settings.load(gpu_catalog=str(tmp_path)))
    assert [*catalog.entries()] == ["small"]
