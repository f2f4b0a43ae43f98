"""Code and files of others: every file that can run or unpickle them or send files away is listed, with its reason."""

import re

import pytest


# What runs code, loads machine code, or unpickles.
RUNS = re.compile(
    r"(?<![\w.])(?:exec|eval|compile|__import__|breakpoint)(?=\()"
    r"|import_module|resolve_name|(?:module|spec)_from\w+|\w+FileLoader|LazyLoader|dynamic_module_utils"
    r"|(?:import|from) (?:runpy|code|codeop|zipimport|pty|c?[pP]ickle|dill|cloudpickle|marshal|shelve|joblib"
    r"|copyreg|cffi|ctypes|subprocess|multiprocessing|kernels)\b"
    r"|\bos\.(?:system|popen|exec\w+|spawn\w+|posix_spawn\w*|fork\w*)|\bsys\.(?:path|path_hooks|meta_path)\b"
    r"|\b(?:torch|np|numpy|evaluate)\.(?:load|hub|package|jit\.load|export\.load|ops\.load_library|utils\.cpp_extension)\b"
    r"|from (?:torch|numpy|yaml|os|transformers) import .*\b(?:\w*load|system|popen|pipeline)\b"
    r"|\byaml\.(?:load\w*|full_load\w*|unsafe_load\w*|C?Loader|FullLoader|UnsafeLoader)\b"
    r"|load_dataset|load_from_disk|\bpipeline(?=\()"
)
# What reaches other machines, and methods that do.
SENDS = re.compile(
    r"(?:import|from) (?:urllib\.request|http|requests|httpx|aiohttp|ftplib|smtplib|xmlrpc|websockets)\b"
    r"|\bsocket\.(?!gethostname)\w+|HfApi|CommitOperation\w+|snapshot_download|hf_hub_download"
    r"|create_(?:commit|repo|branch|tag|pull_request)|upload_\w+|_upload_modified_files|push_to_hub|add_collection_item"
)
# The flag with another value than `False` or the user's own.
TRUSTS = re.compile(r"trust_remote_code[\"']?\]?(?:: bool)? *[=:] *(?!bool = |False|trust_remote_code|args\.)[^\s)]+")
OWN_MODULES = "modules of this package, named in its source"
# "file: what", with the reason why it does no harm.
LISTED = {
    RUNS: {
        "_lazy.py: import_module": OWN_MODULES,
        "analysis/subjects.py: import_module": OWN_MODULES,
        "commands/main.py: import_module": OWN_MODULES,
        "families/family.py: import_module": OWN_MODULES,
        "data/corpora.py: load_dataset": "since version 4 datasets runs no code of a set",
        "data/prepared.py: from multiprocessing": "processes of this package",
        "data/prepared.py: load_from_disk": "Arrow files and JSON that the package has written",
        "hub/card.py: import subprocess": "the code of a card, on a copy whose code is the installed package's",
        "hub/marian_files.py: np.load": "with allow_pickle=False",
        "inference/devices.py: import ctypes": "the C library of the running process",
        "inference/pipeline.py: pipeline": "the user's call; trust_remote_code is theirs",
        "models/seq2seq_loading.py: dynamic_module_utils": "copies the code of the class; runs nothing",
        "training/building.py: resolve_name": "a class named in model.type",
        "training/callbacks.py: torch.load": "with weights_only=True",
    },
    SENDS: {
        "hub/publishing.py: HfApi": "uploads after check_contents, and asks for commit and files of a named model",
        "hub/publishing.py: CommitOperationAdd": "files of the checked folder",
        "hub/publishing.py: CommitOperationDelete": "names of files that an earlier upload left",
        "hub/publishing.py: create_repo": "the repository that the user names",
        "hub/publishing.py: create_branch": "the branch that the user names",
        "hub/publishing.py: create_commit": "the files above",
        "hub/publishing.py: create_tag": "the tag that the user names",
        "hub/publishing.py: upload_folder": "named in a comment",
        "hub/space_app.template: snapshot_download": "the app of a Space reads its model",
        "models/seq2seq_loading.py: snapshot_download": "weights of the named baseline",
        "models/seq2seq_loading.py: _upload_modified_files": "transformers' part of the user's own push_to_hub",
        "training/plan.py: push_to_hub": "the name of a setting",
        "training/sections.py: push_to_hub": "a setting of the Trainer that is refused",
    },
    TRUSTS: {
        "_loading_errors.py: trust_remote_code=True": "a message that names the flag",
        "_plain_card.py: trust_remote_code=True": "code for readers; the package runs it in run_isolated alone",
        "hub/checked_copy.py: trust_remote_code=True": "a docstring",
        "models/__init__.py: trust_remote_code=True": "a docstring",
    },
}


@pytest.mark.parametrize("pattern", LISTED, ids=["runs code", "sends", "trusts"])
def test_what_could_do_harm_is_listed(repository, pattern):
    source = repository / "src/recnmt_hf"
    files = [*source.rglob("*.py"), *source.rglob("*.template")]
    texts = {path.relative_to(source): path.read_text() for path in files}
    found = {f"{path}: {match[0].rstrip('`.')}" for path, text in texts.items() for match in pattern.finditer(text)}
    new, stale = sorted(found - LISTED[pattern].keys()), sorted(LISTED[pattern].keys() - found)
    assert not new, f"{new}: use something safe, or list it with the reason why it does no harm"
    assert not stale, f"{stale}: no longer there; take it off the list"
