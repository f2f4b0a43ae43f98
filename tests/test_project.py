"""Required packages: what is imported is required, and bounds and pins agree."""

import ast
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version


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
