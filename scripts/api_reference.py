#!/usr/bin/env python
"""
Write the API reference as web pages from the docstrings, and check that it is complete: every public class and function
has a docstring, those that packages offer by name describe their arguments, and every cross-reference such as
[`Translator`] names something in the reference.

    pip install ".[docs]"
    python scripts/api_reference.py build/api     # then open build/api/index.html
"""

import argparse
import dataclasses
import importlib
import inspect
import os
import pkgutil
import posixpath
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pdoc
import transformers
from jinja2 import pass_context

import recnmt_hf


# Modules that users do not import: the console command, fast paths, private ones.
LEFT_OUT = re.compile(r"\.(_\w*|kernels_\w+|commands)(\.|$)")
REFERENCE = re.compile(r"\[`(~?)([\w.]+)`\]")
# The folder that contains the package.
ROOT = f"{Path(recnmt_hf.__file__).parents[1]}{os.sep}"
# A field of a dataclass with a comment, which describes it as a docstring would.
COMMENTED_FIELD = re.compile(r"(?m)^    (\w+): .*?  # (?!type: |noqa)(.+)$")
# Arguments that need no words: they are explained once for all models.
UNDERSTOOD = {"self", "cls", "args", "kwargs", "config"}
# References to other packages are not links.
FOREIGN = ("accelerate", "datasets", "evaluate", "sacrebleu", "torch", "transformers")


class Reference:
    """The documented modules, and the links between them."""

    def __init__(self) -> None:
        names = [module.name for module in pkgutil.walk_packages(recnmt_hf.__path__, "recnmt_hf.")]
        names = ["recnmt_hf", *(name for name in names if not LEFT_OUT.search(name))]
        for name in names:
            module = importlib.import_module(name)
            for lazy in getattr(module, "__all__", ()):  # pdoc sees only what is imported
                setattr(module, lazy, getattr(module, lazy))
            for member in vars(module).values():
                if inspect.isclass(member) and member.__module__ == name and dataclasses.is_dataclass(member):
                    comments_to_docstrings(member)
        self.modules = {name: pdoc.doc.Module.from_name(name) for name in names}
        # The page of an object: that of the package that offers it, else that of its module.
        self.pages: dict[str, tuple[str, str]] = {}
        self.by_name: dict[str, set[tuple[str, str]]] = {}
        for name, module in sorted(self.modules.items(), key=lambda pair: hasattr(pair[1].obj, "__all__")):
            for member in members_of(module):
                place = (name, member.qualname)
                self.pages[member.fullname] = self.pages[".".join(member.taken_from)] = place
        for place in self.pages.values():
            self.by_name.setdefault(place[1], set()).add(place)
        self.faults: list[str] = []

    def find(self, target: str, module: str) -> tuple[str, str] | None:
        """Return page and name of a reference in a module, or `None`; `("", "")` for other packages."""
        root = target.split(".")[0]
        if root in FOREIGN or (hasattr(transformers, root) and root not in self.by_name):
            return "", ""
        if target.startswith("."):  # relative to the module of the docstring, which a package may offer elsewhere
            paths = [path for path in [module.rpartition(".")[0] + target, *self.pages] if path.endswith(target)]
            target = next((path for path in paths if path in self.pages or path in self.modules), target)
        if target in self.modules:
            return target, ""
        if target in self.pages:
            return self.pages[target]
        own = [place for path, place in self.pages.items() if path.startswith(f"{module}.") and ends(place[1], target)]
        return min(
            [*own, *self.by_name.get(target, ())], key=lambda place: (place not in own, len(place[0])), default=None
        )

    def link(self, match: re.Match[str], module: str) -> str:
        """Return a cross-reference as a link."""
        short, target = match.groups()
        text = target.rpartition(".")[2] if short else target
        found = self.find(target, module)
        if found is None:
            self.faults.append(f"{module}: there is no {target} for [`{short}{target}`]")
        if not found or not found[0]:
            return f"`{text}`"
        page = posixpath.relpath(found[0].replace(".", "/"), posixpath.dirname(module.replace(".", "/")) or ".")
        # pdoc looks for names with dots itself.
        return f'<a href="{page}.html#{found[1]}">{text.replace(".", "&#46;")}</a>'

    def check(self) -> None:
        """Note public classes and functions without a docstring, or with arguments that it does not mention."""
        for name, module in self.modules.items():
            listed = getattr(module.obj, "__all__", None)
            if listed is not None and (absent := set(listed) - set(module.members)):
                self.faults.append(f"{name}: not in the reference: {', '.join(sorted(absent))}")
            for member in module.members.values():
                is_public = not member.name.startswith("_") and (listed is not None or member.is_inherited is False)
                if is_public and isinstance(member, (pdoc.doc.Class, pdoc.doc.Function)) and not member.docstring:
                    self.faults.append(f"{name}: {member.qualname} has no docstring")
            for member in members_of(module):
                function = member.obj if inspect.isclass(member.obj) else inspect.unwrap(member.obj)
                is_ours = str(getattr(function, "__module__", None)).startswith("recnmt_hf")
                is_listed = member.qualname in (listed or ()) or "Args:" in (getattr(function, "__doc__", None) or "")
                if is_ours and is_listed and (absent := undescribed_arguments(function)):
                    self.faults.append(f"{name}: {member.qualname} does not describe {', '.join(absent)}")

    def write(self, folder: Path) -> None:
        """Write all pages."""

        @pass_context
        def to_markdown(context: Any, docstring: str) -> str:
            module = context["module"].modulename
            text = REFERENCE.sub(lambda match: self.link(match, module), inspect.cleandoc(docstring))
            return pdoc.docstrings.convert(text, "google", None)

        pdoc.render.configure(show_source=False, search=True, footer_text=f"recnmt_hf {recnmt_hf.__version__}")
        pdoc.render.env.filters["to_markdown"] = to_markdown
        pdoc.pdoc(*self.modules, f"!.*{LEFT_OUT.pattern}", output_directory=folder)
        # Values of constants may name folders of this computer.
        for page in (path for path in folder.rglob("*") if path.suffix in (".html", ".js")):
            text = page.read_text(encoding="utf-8")
            page.write_text(text.replace(ROOT, ""), encoding="utf-8")


def members_of(module: pdoc.doc.Module) -> Iterator[pdoc.doc.Doc[Any]]:
    """Yield the members of a module and of its classes."""
    for member in module.members.values():
        yield member
        if isinstance(member, pdoc.doc.Class):
            yield from member.members.values()


def comments_to_docstrings(kind: type) -> None:
    """Let pdoc show the comments of a dataclass's fields."""
    for name, comment in COMMENTED_FIELD.findall(pdoc.doc_ast.get_source(kind)):
        pdoc.doc_ast.walk_tree(kind).var_docstrings.setdefault(name, f"{comment[0].upper()}{comment[1:]}.")


def undescribed_arguments(function: Any) -> list[str]:
    """Return the arguments of a function, or of a class that has a constructor, that its docstring does not mention."""
    text = function.__doc__ or ""
    if inspect.isclass(function):
        if dataclasses.is_dataclass(function) or "__init__" not in vars(function):
            return []
        function = function.__init__
        text += function.__doc__ or ""
    elif not inspect.isfunction(function):
        return []
    names = (name for name in inspect.signature(function).parameters if name not in UNDERSTOOD)
    return [name for name in names if not name.startswith("_") and not re.search(rf"\b{name}\b", text)]


def ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder of the pages")
    folder = parser.parse_args().output
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # types that modules import only for type checkers are printed by name
        reference = Reference()
        reference.check()
        reference.write(folder)
    for fault in sorted(set(reference.faults)):
        print(fault, file=sys.stderr)
    print(f"{len(reference.modules)} pages in {folder}")
    return 1 if reference.faults else 0


if __name__ == "__main__":
    sys.exit(main())
