"""The package: public names, cheap import, registration, dependencies between packages."""

import ast
import graphlib
import importlib
import importlib.util
import inspect
import os
import signal
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import recnmt_hf
from recnmt_hf._lazy import names_for_type_checkers
from recnmt_hf.families import FAMILIES


# Most lines of each package, and of all others together.
BUDGET = {
    **{"models": 10381, "training": 3402, "data": 3291, "inference": 3176, "hub": 1839, "commands": 1528},
    "others": 3320,
}
# The packages that each package may import.
DEPENDENCIES = {
    "models": set(),
    "data": {"models"},
    "families": {"models"},
    "metrics": {"models", "data"},
    "inference": {"models", "data", "metrics"},
    "training": {"models", "families", "data", "metrics", "inference"},
    "analysis": {"models", "families", "data", "metrics", "inference", "training"},
    "hub": {"models", "families", "data", "metrics", "inference", "training"},
    "demo": {"models", "families", "data", "metrics", "inference", "training", "analysis", "hub"},
    "commands": {*("models", "families", "data", "metrics", "inference", "training", "analysis", "hub", "demo")},
}


def test_packages_stay_within_their_lines(repository):
    """A feature that needs more removes something, or the changelog says why the budget moves."""
    lines = dict.fromkeys(BUDGET, 0)
    for path in (repository / "src/recnmt_hf").rglob("*.py"):
        package = path.relative_to(repository / "src/recnmt_hf").parts[0]
        lines[package if package in BUDGET else "others"] += len(path.read_text(encoding="utf-8").splitlines())
    assert {name: count for name, count in lines.items() if count > BUDGET[name]} == {}
    tests = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (repository / "tests").rglob("*.py"))
    assert tests <= 0.85 * sum(BUDGET.values())


@pytest.mark.parametrize("package", ["recnmt_hf", "recnmt_hf.data", "recnmt_hf.inference"])
def test_every_public_name_resolves(package):
    """Type checkers know the same names, those of families also by `import *`."""
    module, of_checkers = importlib.import_module(package), names_for_type_checkers(package)
    of_families = {name: place for family in FAMILIES.values() for name, place in family.class_modules.items()}
    others = {"MODEL_TYPES", "__version__", *of_families} if package == "recnmt_hf" else set()
    assert set(module.__all__) - others == set(of_checkers) - others
    assert all(getattr(module, name) is not None for name in module.__all__) and set(module.__all__) <= set(dir(module))
    for name, place in of_families.items() if others else ():
        assert getattr(module, name).__name__ == name
        assert of_checkers.get(name) == place or f"from {place} import *" in inspect.getsource(module)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        getattr(module, "Nothing")  # noqa: B009


AUTO = """
import recnmt_hf, transformers
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM
for kind in recnmt_hf.MODEL_TYPES:
    config = AutoConfig.for_model(kind, vocab_size=20, d_model=8, encoder_attention_heads=2, decoder_attention_heads=2,
                                  encoder_ffn_dim=8, decoder_ffn_dim=8, encoder_layers=1, decoder_layers=1)
    print(type(config).__name__, type(AutoModel.from_config(config)).__name__,
          type(AutoModelForSeq2SeqLM.from_config(config)).__name__)
print(transformers.pipelines.PIPELINE_REGISTRY.check_task("recnmt-translation")[1]["impl"].__name__)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    ["import recnmt_hf", "from transformers import AutoModel", "import recnmt_hf.models.recurrent_layers"],
    ids=["package-first", "transformers-first", "a-module-first"],
)
def test_transformers_knows_the_zoo(first):
    """After `import recnmt_hf` alone: the Auto classes know its models, and `pipeline` its task."""
    result = subprocess.run([sys.executable, "-c", f"{first}\n{AUTO}"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    *lines, pipeline = result.stdout.splitlines()
    assert len(lines) == len(recnmt_hf.MODEL_TYPES) and pipeline == "TranslationPipeline"
    for line in lines:
        config, base, generating = line.split()
        prefix = config.removesuffix("Config")
        assert (base, generating) == (f"{prefix}Model", f"{prefix}ForConditionalGeneration")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("--help", 0, "COMMAND"),
        ("--version", 0, recnmt_hf.__version__),
        ("", 2, "required"),
        ("transalte model", 2, "invalid choice"),
        ("translate model --beams x", 2, "--beams"),
        ("train", 2, "required"),
        ("sweep recipe.yaml", 2, "scripts/experiments/sweep.py"),
    ],
)
@pytest.mark.parametrize("start", ["script", "module"])
def test_help_and_usage_errors_import_no_models(tmp_path, start, words, code, message):
    """They are fast, because neither torch nor transformers is imported; by a script as pip writes it, too."""
    (tmp_path / "recnmt").write_text("import sys\nfrom recnmt_hf.commands.main import main\nsys.exit(main())\n")
    program = [str(tmp_path / "recnmt")] if start == "script" else ["-m", "recnmt_hf.commands.main"]
    command = [sys.executable, "-X", "importtime", *program, *words.split()]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == code and message in result.stdout + result.stderr
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if "import time" in line}
    assert "recnmt_hf" in imported and not imported & {"torch", "transformers", "datasets", "numpy"}


SIGNALS = """
import os, signal, sys
from recnmt_hf import _interrupts
from recnmt_hf.commands import data
from recnmt_hf.commands.main import main
_interrupts.SAME_REQUEST = 0  # a later signal is a second request at once
moment, number = os.environ["MOMENT"], int(os.environ["NUMBER"])
signal.signal(signal.SIGINT, signal.default_int_handler)  # where the suite has inherited another one
signal.signal(signal.SIGTERM, signal.SIG_DFL)
def run(args):
    try:
        signal.raise_signal(number)
    except KeyboardInterrupt:
        if moment == "twice":
            signal.raise_signal(number)
        if moment == "work":
            raise
data.run_corpus = run
sys.exit(main(["corpus", "out"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["work", "dropped by a library", "twice"])
def test_signals(tmp_path, moment, number):
    """The exit code is 130 or 143, without a traceback."""
    script = tmp_path / "recnmt"
    script.write_text(SIGNALS)
    environment = {**os.environ, "MOMENT": moment, "NUMBER": str(int(number))}
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert result.returncode == 128 + number, result.stderr
    assert result.stderr.split("\n") == (["", "recnmt corpus: interrupted.", ""] if moment != "twice" else [""])


def test_processes_that_the_command_spawns_know_the_models(tmp_path):
    """They have the name and arguments of the command but register the models at once."""
    script = tmp_path / "recnmt"
    script.write_text("""
import multiprocessing, sys
from recnmt_hf._registration import is_command
def work():
    from transformers import AutoConfig
    print(is_command(), type(AutoConfig.for_model("rnmt")).__name__, flush=True)
if __name__ == "__main__":
    print(is_command(), "transformers" in sys.modules, flush=True)
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
""")
    result = subprocess.run([sys.executable, script, "translate"], capture_output=True, text=True)
    assert result.stdout.splitlines() == ["True False", "False RNMTConfig"], result.stderr


def imported(path):
    """Yield the names of the modules that a file imports, with their level."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""
        elif isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)


def test_imported_packages_are_required(repository):
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    extras = ("plots", "marian", "metrics", "engines", "onnx", "demo", "triton", "fla")
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    known = {"recnmt-hf"} | {canonicalize_name(Requirement(text).name) for texts in lists for text in texts}
    names = {
        "yaml": "pyyaml",
        "ruamel": "ruamel-yaml",
        "markdown_it": "markdown-it-py",
        "fla": "flash-linear-attention",
    }  # of other imports
    for path in (repository / "src").rglob("*.py"):
        for level, name in imported(path):
            root = name.split(".")[0]
            is_known = root in sys.stdlib_module_names or canonicalize_name(names.get(root, root)) in known
            assert level or is_known, (path, root)


def test_models_are_one_flat_folder(repository):
    """They import torch, transformers, the standard library and siblings by `from .name`: else the Hub breaks."""
    folder = repository / "src" / "recnmt_hf" / "models"
    assert not [path for path in folder.iterdir() if path.is_dir() and path.name != "__pycache__"]
    for path in folder.glob("*.py"):
        for level, name in imported(path):
            if level:
                assert level == 1 and (folder / f"{name}.py").is_file(), (path.name, name)
            else:
                root = name.split(".")[0]
                known = {
                    "torch",
                    "transformers",
                    "huggingface_hub",
                    "safetensors",
                    "triton",
                    "fla",
                }  # the last two if present
                assert root in known | sys.stdlib_module_names, (path.name, name)


def test_dependencies_point_one_way(repository):
    source = repository / "src" / "recnmt_hf"
    shared = {path.stem for path in source.glob("_*.py")} - {"__init__"} | {"errors", "options"}  # import only models
    for package, dependencies in DEPENDENCIES.items():
        for path in (source / package).rglob("*.py"):
            package_level = len(path.relative_to(source).parts)  # 2 in a package's own files, 3 in its subfolders
            for level, name in imported(path):
                if level == package_level and name:
                    allowed = dependencies | (shared if package != "models" else set())
                    assert name.split(".")[0] in allowed, (path, name)
    for module in shared:
        # The models and a pipeline are registered with transformers.
        allowed = shared | {"models"} | ({"families", "inference"} if module == "_registration" else set())
        for level, name in imported(source / f"{module}.py"):
            assert level != 1 or name.split(".")[0] in allowed, (module, name)


def test_modules_import_each_other_without_cycles(repository):
    """Imports within functions and, but for the lists of names in `__init__.py`, for type checkers count too."""
    source = repository / "src"
    files = {".".join(path.relative_to(source).with_suffix("").parts): path for path in source.rglob("*.py")}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    graph = {}
    for name, path in files.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        graph[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if path.name == "__init__.py" and getattr(node, "col_offset", 0):
                continue  # names that are imported on first use
            if isinstance(node, ast.ImportFrom):
                module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                names = [f"{module}.{alias.name}" for alias in node.names]
                graph[name].update(one if one in files else module for one in names)
            elif isinstance(node, ast.Import):
                graph[name].update(alias.name for alias in node.names)
    order = list(graphlib.TopologicalSorter(graph).static_order())  # the error contains the cycle
    assert order.index("recnmt_hf.inference.backends.protocol") < order.index("recnmt_hf.inference.translator")
