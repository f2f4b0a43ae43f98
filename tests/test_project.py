"""The project's own files: one version, bounds and pins that agree, notes of the release, tables of real files."""

import ast
import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import recnmt_hf


# Packages that are imported under another name.
DISTRIBUTIONS = {"yaml": "pyyaml", "ruamel": "ruamel-yaml", "markdown_it": "markdown-it-py"}


@pytest.fixture(scope="module")
def project(repository):
    return tomllib.loads((repository / "pyproject.toml").read_text())


def requirements(project, *extras):
    texts = list(project["project"]["dependencies"])
    for extra in extras or project["project"]["optional-dependencies"]:
        texts += project["project"]["optional-dependencies"][extra]
    each = map(Requirement, texts)
    return {canonicalize_name(one.name): one for one in each if canonicalize_name(one.name) != "recnmt-hf"}


def pins(path):
    lines = (line for line in path.read_text().splitlines() if line and not line.startswith("#"))
    return {canonicalize_name(name): Version(version) for name, version in (line.split("==") for line in lines)}


def test_version_is_in_one_place(repository, project):
    """In the package, as a literal, so that building reads it without importing anything."""
    assert project["project"]["dynamic"] == ["version"] and "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "recnmt_hf.__version__"}
    tree = ast.parse((repository / "src" / "recnmt_hf" / "__init__.py").read_text())
    values = [
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__version__"
    ]
    assert values == [recnmt_hf.__version__]
    assert not re.search(r"^version:", (repository / "CITATION.cff").read_text(), flags=re.MULTILINE)


def test_version_has_release_notes(repository):
    command = ["bash", str(repository / "scripts" / "release_notes.sh")]
    notes = subprocess.run([*command, f"v{recnmt_hf.__version__}"], capture_output=True, text=True, check=True).stdout
    assert notes.strip() and "## 0" not in notes
    unknown = subprocess.run([*command, "99.0"], capture_output=True, text=True)
    assert unknown.returncode == 1 and "has no section for version 99.0. Add" in unknown.stderr


def test_imported_packages_are_required(repository, project):
    extras = ("plots", "marian", "metrics", "engines", "onnx", "filters", "demo")
    known = {"recnmt-hf"}.union(*(requirements(project, extra).keys() for extra in extras))
    for path in (repository / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module]
            else:
                continue
            for root in {module.split(".")[0] for module in modules} - sys.stdlib_module_names:
                assert canonicalize_name(DISTRIBUTIONS.get(root, root)) in known, (path, root)


def test_pins_are_within_the_bounds(repository, project):
    pinned = pins(repository / "scripts" / "constraints.txt")
    for name, requirement in requirements(project).items():
        assert pinned[name] in requirement.specifier, name


def test_lowest_versions_are_the_bounds(repository, project):
    """Of what is imported; the tools that check the source may be any."""
    lowest = pins(repository / "scripts" / "lowest_constraints.txt")
    bounds = {
        name: Version(next(part.version for part in requirement.specifier if part.operator == ">="))
        for name, requirement in requirements(project).items()
        if name not in ("mypy", "mutmut", "pre-commit", "pre-commit-hooks", "ruff")
    }
    assert lowest == bounds
