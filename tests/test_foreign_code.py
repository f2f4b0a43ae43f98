"""Code and files of others: every place that can run or unpickle them or send files away is listed, with its reason."""

import ast
import builtins
import re
import textwrap

import pytest


# What runs code, loads machine code, or unpickles.
RUNS = re.compile(
    r"exec|eval|compile|__import__|breakpoint"
    r"|importlib\.(import_module|reload|machinery\..*|util\.(module|spec)_from\w+|util\.LazyLoader)"
    r"|pkgutil\.resolve_name|(imp|runpy|code|codeop|zipimport|pty|multiprocessing)\..*"
    r"|subprocess\.(run|call|check_\w+|Popen|getoutput|getstatusoutput)|asyncio\.create_subprocess\w+"
    r"|os\.(system|popen|exec\w+|spawn\w+|posix_spawn\w*|fork\w*|startfile)"
    r"|sys\.(path|path_hooks|meta_path)(\..*)?"
    r"|(_?pickle|cPickle|dill|cloudpickle|marshal|shelve|joblib|copyreg|cffi|kernels)\..*|pandas\.read_pickle"
    r"|numpy\.(load|lib\.format\..*|ctypeslib\..*)"
    r"|torch\.(load|hub\..*|package\..*|jit\.load|export\.load|(ops|classes)\.load_library|utils\.cpp_extension\..*)"
    r"|yaml\.(load|load_all|full_load\w*|unsafe_load\w*|Loader|FullLoader|UnsafeLoader|CLoader)"
    r"|ctypes\.([A-Za-z]*DLL|[a-z]*dll(\..*)?)"
    r"|datasets\.(load_\w+|Dataset\.load_from_disk)|evaluate\.load|transformers\.(pipeline|dynamic_module_utils\..*)"
)
# What reaches other machines, and methods that do.
SENDS = re.compile(
    r"(urllib\.request|http\.client|requests|httpx|aiohttp|ftplib|smtplib|xmlrpc|websockets)\..*"
    r"|socket\.(?!gethostname).*"
    r"|huggingface_hub\.(?!ModelCard|EvalResult|errors|constants|utils\.(build_hf_headers|hf_raise_for_status)).*"
)
SENDING_METHODS = re.compile(
    r"create_(commit|repo|branch|tag|pull_request)|upload_\w+|_upload_modified_files|push_to_hub|add_collection_item"
)
# "file: function: what", with the reason why it does no harm. A further one in a listed function has the same reason.
LISTED_RUNS = {
    "hub/marian_files.py: read_npz: numpy.load": "with allow_pickle=False",
    "_lazy.py: lazy_names.get: importlib.import_module": "modules of this package, named in its source",
    "analysis/subjects.py: load_function: importlib.import_module": "modules of this package, named in its source",
    "families/__init__.py: : importlib.import_module": "modules of this package, named in its source",
    "families/family.py: Family.load_class: importlib.import_module": "modules of this package, named in its source",
    "commands/main.py: build_parser: importlib.import_module": "modules of this package, from the table of commands",
    "data/prepared.py: in_processes: multiprocessing.get_context": "processes of this package",
    "data/corpora.py: Corpus._read_dataset: datasets.load_dataset": "since version 4 datasets runs no code of a set",
    "data/prepared.py: prepare_dataset: datasets.load_from_disk": "Arrow files and JSON that the package has written",
    "hub/card.py: run_isolated: subprocess.run": "the code of a card, on a copy whose code is the installed package's",
    "inference/pipeline.py: pipeline: transformers.pipeline": "the user's call; trust_remote_code is theirs",
    "training/callbacks.py: MovingAverage.resume: torch.load": "with weights_only=True",
    "models/seq2seq_loading.py: Seq2SeqPreTrainedModel.save_pretrained: "
    "transformers.dynamic_module_utils.custom_object_save": "copies the code of the class; runs nothing",
    "training/building.py: config_class_of: pkgutil.resolve_name": "a class named in model.type",
    "inference/devices.py: keep_freed_memory: ctypes.CDLL": "the C library of the running process",
}
# Values of trust_remote_code that are neither `False` nor the user's own flag.
LISTED_TRUST = {
    "_loading_errors.py: explained_loading: text": "a message that names the flag",
    "_plain_card.py: usage: text": "code for readers; the package runs it in run_isolated alone",
}
LISTED_SENDS = {
    "hub/publishing.py: prepare_space: huggingface_hub.HfApi": "asks for commit and files of a named model",
    "hub/publishing.py: prepare_space: huggingface_hub.SpaceCard": "text of a file",
    "hub/publishing.py: prepare_space: huggingface_hub.SpaceCardData": "text of a file",
    "inference/model_settings.py: read_model_task: huggingface_hub.hf_hub_download": "reads a file of the loaded model",
    "hub/publishing.py: upload: huggingface_hub.HfApi": "uploads after check_contents",
    "hub/publishing.py: explained_requests: huggingface_hub.utils.get_token": "masks the token in an error",
    "hub/publishing.py: upload: huggingface_hub.CommitOperationAdd": "files of the checked folder",
    "hub/publishing.py: upload: huggingface_hub.CommitOperationDelete": "names of files that an earlier upload left",
    "hub/publishing.py: upload: create_repo": "the repository that the user names",
    "hub/publishing.py: upload: create_branch": "the branch that the user names",
    "hub/publishing.py: upload: create_commit": "the files above",
    "hub/publishing.py: upload: create_tag": "the tag that the user names",
    "hub/publishing.py: upload: add_collection_item": "the collection that the user names",
    "models/configuration_seq2seq.py: interval.check: huggingface_hub.dataclasses.as_validated_field": "checks a value",
    "models/configuration_seq2seq.py: strict_config: huggingface_hub.dataclasses.strict": "checks the types of fields",
    "models/seq2seq_loading.py: read_safetensors: huggingface_hub.snapshot_download": "weights of the named baseline",
    "models/seq2seq_loading.py: Seq2SeqPreTrainedModel: _upload_modified_files": "the user's own push_to_hub",
    "models/seq2seq_loading.py: Seq2SeqPreTrainedModel._upload_modified_files: _upload_modified_files": (
        "transformers' part of it, for the folder that its save_pretrained has written"
    ),
}


def places(tree):
    """Yield every node with the dotted name of the function or class that it stands in."""

    def walk(node, place):
        for child in ast.iter_child_nodes(node):
            inner = place
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{place}.{child.name}" if place else child.name
            yield child, place
            yield from walk(child, inner)

    yield from walk(tree, "")


def imported(tree):
    """Return what imported names stand for, e.g. `{"np": "numpy", "load_dataset": "datasets.load_dataset"}`."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def dotted(node, names):
    """Return the full name of a builtin or of something imported that an expression stands for, or `None`."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id if hasattr(builtins, node.id) else None)
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, names)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def uses(tree, pattern):
    """Yield places and full names of everything that a file uses and a pattern matches."""
    names = imported(tree)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node, place in places(tree):
        name = None
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in inner:
            name = dotted(node, names)
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            name = f"{node.module}.*"
        if name is not None and pattern.fullmatch(name):
            yield f"{place}: {name}"


def trusts(tree):
    """Yield places that set `trust_remote_code` to anything but `False` or the user's flag, also in texts of code."""
    for node, place in places(tree):
        values = []
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            values = [node.value]
        elif isinstance(node, ast.Dict):
            values = [v for k, v in zip(node.keys, node.values, strict=True) if is_flag(k)]
        elif isinstance(node, ast.Assign):
            values = [node.value for target in node.targets if is_flag(getattr(target, "slice", target))]
        elif isinstance(node, ast.arguments):
            names = [*node.posonlyargs, *node.args]
            pairs = [*zip(names[len(names) - len(node.defaults) :], node.defaults, strict=True)]
            pairs += zip(node.kwonlyargs, node.kw_defaults, strict=True)
            values = [default for name, default in pairs if name.arg == "trust_remote_code" and default is not None]
        elif is_code(node) and not is_docstring(node, tree):
            yield f"{place}: text"
        for value in map(ast.unparse, values):
            if value not in ("False", "trust_remote_code", "args.trust_remote_code"):
                yield f"{place}: {value}"


def is_flag(node):
    """Return whether a name, an attribute or a key is that of the flag."""
    name = node.value if isinstance(node, ast.Constant) else getattr(node, "attr", getattr(node, "id", None))
    return name == "trust_remote_code"


def is_code(node):
    return isinstance(node, ast.Constant) and re.search(r"trust_remote_code *= *True", str(node.value)) is not None


def is_docstring(node, tree):
    return any(isinstance(each, ast.Expr) and each.value is node for each in ast.walk(tree))


def methods(tree, pattern):
    """Yield places that use or define a method whose name a pattern matches."""
    for node, place in places(tree):
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "name", None)
        if isinstance(node, ast.Attribute | ast.FunctionDef) and pattern.fullmatch(name):
            yield f"{place}: {name}"


@pytest.fixture(scope="module")
def trees(repository):
    """Syntax trees of all of the package's files, by path."""
    source = repository / "src/recnmt_hf"
    return {str(path.relative_to(source)): ast.parse(path.read_text()) for path in sorted(source.rglob("*.py"))}


def compare(found, listed):
    """Fail for places that are not listed and for listed places that no longer exist."""
    new, stale = sorted(found - listed.keys()), sorted(listed.keys() - found)
    assert not new, f"{new}: use something safe, or list it with the reason why it does no harm"
    assert not stale, f"{stale}: no longer there; take it off the list"


def test_what_runs_code_is_listed(trees):
    compare({f"{path}: {use}" for path, tree in trees.items() for use in uses(tree, RUNS)}, LISTED_RUNS)


def test_trust_is_the_users_alone(trees):
    compare({f"{path}: {use}" for path, tree in trees.items() for use in trusts(tree)}, LISTED_TRUST)


def test_what_sends_is_listed(trees):
    found = {path: {*uses(tree, SENDS), *methods(tree, SENDING_METHODS)} for path, tree in trees.items()}
    compare({f"{path}: {use}" for path in found for use in found[path]}, LISTED_SENDS)


def test_a_new_place_is_found():
    tree = ast.parse(
        textwrap.dedent(
            """
            import importlib, os, pickle as p, requests, subprocess, torch, yaml
            import numpy as np
            from ctypes import cdll
            from marshal import *
            from torch import load as read
            from huggingface_hub import upload_file

            def run(model, text, trust_remote_code=None, *, name="x"):
                "Docstring with trust_remote_code=True."
                exec(text), eval(text), model.eval(), model.compile(), torch.compile(model)
                subprocess.run(text), os.execv(text, []), os.path.exists(text)
                yaml.load(text, yaml.Loader), yaml.safe_load(text), yaml.SafeLoader(text)
                return map(p.loads, text), read(text), np.load(text), np.array(text), cdll.LoadLibrary(text)

            class Model:
                def load(self, args):
                    self.load("x", trust_remote_code=True), self.load("x", trust_remote_code=args.trust_remote_code)
                    settings = {"trust_remote_code": False, "other": True}
                    settings["trust_remote_code"] = settings["other"]
                    self.trust_remote_code = 1
                    importlib.import_module(args.name), importlib.metadata.version("x")
                    self.push_to_hub(args.name), requests.post(args.name), upload_file
                    return "load(trust_remote_code=True)"
            """
        )
    )
    used = "exec eval subprocess.run os.execv yaml.load yaml.Loader pickle.loads torch.load numpy.load"
    used = {f"run: {name}" for name in (*used.split(), "ctypes.cdll.LoadLibrary")}
    assert set(uses(tree, RUNS)) == {": marshal.*", "Model.load: importlib.import_module", *used}
    values = ("True", "1", "settings['other']", "text")
    assert set(trusts(tree)) == {"run: None", *(f"Model.load: {value}" for value in values)}
    sends = {*uses(tree, SENDS), *methods(tree, SENDING_METHODS)}
    assert sends == {"Model.load: push_to_hub", "Model.load: requests.post", "Model.load: huggingface_hub.upload_file"}
