"""What is published: metadata of the distributions, their pages on PyPI, and the workflow."""

import re
import tomllib
from pathlib import Path

import pytest
import release
from programs import ROOT

import _calcops_jit

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = ROOT / ".github" / "workflows"


@pytest.mark.skipif(not (ROOT / "calcops" / "lammps").is_dir(), reason="no part of an sdist")
def test_calcops_lammps_needs_the_calcops_of_its_own_version():
    settings = tomllib.loads((ROOT / "calcops" / "lammps" / "pyproject.toml").read_text())
    version = _calcops_jit.__version__
    assert settings["project"]["version"] == version
    assert f"calcops=={version}" in settings["project"]["dependencies"]


def test_every_package_and_module_of_calcops_is_installed():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "packages"
    ]
    folders = {path.parent for path in (ROOT / "calcops").glob("*/__init__.py")}
    names = {f"calcops.{folder.name}" for folder in folders} - {"calcops.lammps"}
    assert names == {name for name in packages if name.startswith("calcops.")}


def test_every_supported_python_is_tried():
    (supported,) = re.findall(r"Python (3\.\d+) to (3\.\d+)", (ROOT / "README.md").read_text())[:1]
    assert (release.PYTHONS[0], release.PYTHONS[-1]) == supported
    assert PROJECT["requires-python"] == f">={supported[0]}"


def test_links_of_a_published_page_are_absolute_and_code_stays_as_it_is():
    address = "https://host/owner/name/blob/v1"
    page = "[`a`](docs/a.md#b) [c](https://other/c) [d](#d) ![e](e.png) `x[0](y)`"
    page += '<source srcset="docs/f.png"><img src="docs/g.png">'
    assert release.with_absolute_links(page, address) == (
        "[`a`](https://host/owner/name/blob/v1/docs/a.md#b) [c](https://other/c) [d](#d) "
        "![e](https://host/owner/name/raw/v1/e.png) `x[0](y)`"
        '<source srcset="https://host/owner/name/raw/v1/docs/f.png">'
        '<img src="https://host/owner/name/raw/v1/docs/g.png">'
    )


@pytest.mark.skipif(not WORKFLOWS.is_dir(), reason="no part of an sdist")
def test_the_workflow_publishes_what_make_dist_has_built_and_tried():
    yaml = pytest.importorskip("yaml", reason="reads the workflow")
    jobs = yaml.safe_load((WORKFLOWS / "release.yml").read_text())["jobs"]
    commands = [step.get("run", "") for step in jobs["build"]["steps"]]
    pythons = " ".join(release.PYTHONS)
    assert f'make dist pythons="{pythons}" address="$FILES"' in commands
    (upload,) = [step for step in jobs["build"]["steps"] if "upload" in step.get("uses", "")]
    assert ROOT / upload["with"]["path"] == release.DIST
    (python,) = [step for step in jobs["build"]["steps"] if "python" in step.get("uses", "")]
    assert python["with"]["python-version"].split() == list(release.PYTHONS)
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}


def test_the_image_is_made_of_the_files_that_its_first_line_makes():
    lines = Path(ROOT, "Containerfile").read_text().splitlines()
    assert "pip wheel --no-deps -w dist ." in lines[0]
    assert any(line.startswith("COPY dist/calcops-*-none-any.whl ") for line in lines)
