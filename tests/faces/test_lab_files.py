"""The files that JupyterLab loads into the browser."""

import hashlib
import json
import re
from pathlib import Path

import gpu_panels.lab
import pytest
import tomllib

from gpu_runtime import __version__

BROWSER = Path(gpu_panels.lab.__file__).parent / "browser"
SCRIPT = BROWSER / "static" / "remoteEntry.js"
PACKAGE = json.loads((BROWSER / "package.json").read_text())
MOST_SCRIPT_BYTES = 30_000


def test_the_url_of_the_script_changes_with_its_content():
    """Jupyter tells browsers to keep the script for a year. With an old URL they would not load a new version."""
    digest = hashlib.sha256(SCRIPT.read_bytes()).hexdigest()[:12]
    load = PACKAGE["jupyterlab"]["_build"]["load"]
    assert load == f"static/remoteEntry.js?v={digest}", "write this value into package.json"


def test_the_script_is_small_makes_no_html_of_texts_and_loads_nothing_from_elsewhere():
    text = SCRIPT.read_text()
    assert len(text.encode()) <= MOST_SCRIPT_BYTES
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    urls = re.findall(r"https?://[^\s'\"`]+", SCRIPT.read_text())
    assert urls == ["http://www.w3.org/2000/svg"], "the name of SVG, which nobody loads"


def test_the_script_has_the_settings_of_the_schema_and_their_defaults():
    """JupyterLab's server finds the schema by the name of the extension and of its plugin."""
    schemas = BROWSER / PACKAGE["jupyterlab"]["schemaDir"]
    schema = json.loads((schemas / "gpu-console" / "memory.json").read_text())
    text = SCRIPT.read_text()
    chosen = re.search(r"const chosen = \{(.*)\}", text)
    assert chosen
    defaults = {name: one["default"] for name, one in schema["properties"].items()}
    written = ", ".join(f"{name}: {value!r}" for name, value in defaults.items())
    assert chosen[1] == written
    assert "registry?.load(`${NAME}:memory`)" in text


@pytest.mark.parametrize("file", ["package.json", "install.json"])
def test_the_extension_has_the_name_of_the_package(file):
    found = json.loads((BROWSER / file).read_text())
    assert found.get("name", found.get("packageName")) == "gpu-console"
    written = __version__.replace(".dev", "-dev.")  # as npm writes a version under development
    assert found.get("version", written) == written
    project = tomllib.loads((BROWSER.parents[3] / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__


def test_the_package_is_found_as_a_prebuilt_extension_of_jupyterlab_and_names_no_address_that_is_none():
    """JupyterLab's extension manager lists packages with these classifiers. The repository has no address yet."""
    project = tomllib.loads((BROWSER.parents[3] / "pyproject.toml").read_text())["project"]
    lab = "Framework :: Jupyter :: JupyterLab"
    wanted = {lab, f"{lab} :: 4", f"{lab} :: Extensions", f"{lab} :: Extensions :: Prebuilt"}
    assert wanted <= set(project["classifiers"]) and {"gpu", "jupyterlab"} <= set(
        project["keywords"]
    )
    for address in project.get("urls", {}).values():
        assert re.match(r"https://(?!example\.)", address), address
