"""What is imported is required."""

import ast
import sys
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


# Packages that are imported under another name.
DISTRIBUTIONS = {"yaml": "pyyaml", "ruamel": "ruamel-yaml", "markdown_it": "markdown-it-py"}


def test_imported_packages_are_required(repository):
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    extras = ("plots", "marian", "metrics", "engines", "onnx", "filters", "demo", "triton")
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    known = {"recnmt-hf"} | {canonicalize_name(Requirement(text).name) for texts in lists for text in texts}
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
