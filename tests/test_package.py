"""The package: public names, cheap import, registration, arrows between the rooms."""

import ast
import os
import re
import subprocess
import sys
import time

import pytest

import recnmt_hf


ROOMS = ["models", "data", "evaluation", "training", "analysis", "hub", "commands"]
# Which rooms a room may know (the order of the house: models know nobody, data only them, commands know all).
ARROWS = {
    "models": set(),
    "data": {"models"},
    "evaluation": {"models", "data"},
    "training": {"models", "data", "evaluation"},
    "analysis": {"models", "data", "evaluation", "training"},
    "hub": {"models", "data", "evaluation", "training"},
    "commands": {"models", "data", "evaluation", "training", "analysis", "hub"},
}


def python(code, **environment):
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_every_public_name_resolves():
    for name in recnmt_hf.__all__:
        assert getattr(recnmt_hf, name) is not None
    assert set(recnmt_hf.__all__) <= set(dir(recnmt_hf))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        getattr(recnmt_hf, "Nothing")  # noqa: B009


def test_import_is_lazy():
    """Importing the package imports neither torch nor the models, so it costs next to nothing."""
    assert (
        python("import sys, recnmt_hf; print('torch' in sys.modules, 'transformers' in sys.modules)") == "False False"
    )
    start = time.perf_counter()
    python("import recnmt_hf")
    alone = time.perf_counter() - start
    start = time.perf_counter()
    python("import transformers")
    assert alone < time.perf_counter() - start + 0.3


@pytest.mark.parametrize(
    "code",
    [
        "import recnmt_hf; from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM",
        "from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM; import recnmt_hf",
        "import recnmt_hf as r; r.NMTTransformerModel; import recnmt_hf\n"
        "from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM",
        "import recnmt_hf as r; r.BiARNTransformerModel; import recnmt_hf\n"
        "from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM",
        "import recnmt_hf as r; r.BiARNTransformerConfig; import recnmt_hf\n"
        "from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM",
        "import recnmt_hf.models.recurrent_layers\n"
        "from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM",
        "import recnmt_hf\nfrom transformers.modeling_layers import GradientCheckpointingLayer\n"
        "from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM",
        "import recnmt_hf\nfrom transformers.generation.utils import GenerationMixin\n"
        "from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM",
    ],
    ids=[
        "package-first",
        "transformers-first",
        "model-first",
        "second-model-first",
        "configuration-first",
        "layers-first",
        "layers-of-transformers-first",
        "generation-first",
    ],
)
def test_auto_classes_know_the_zoo_in_any_order(code):
    code += """
for kind in recnmt_hf.MODEL_TYPES:
    config = AutoConfig.for_model(kind, vocab_size=20, d_model=8, encoder_attention_heads=2, decoder_attention_heads=2,
                                  encoder_ffn_dim=8, decoder_ffn_dim=8, encoder_layers=1, decoder_layers=1)
    print(type(config).__name__, type(AutoModel.from_config(config)).__name__,
          type(AutoModelForSeq2SeqLM.from_config(config)).__name__)
"""
    lines = python(code).splitlines()
    assert len(lines) == len(recnmt_hf.MODEL_TYPES)
    for line in lines:
        config, base, generating = line.split()
        prefix = config.removesuffix("Config")
        assert (base, generating) == (f"{prefix}Model", f"{prefix}ForConditionalGeneration")


def imported(path):
    """Relative and absolute module names that a file imports, with their level."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""
        elif isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)


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
                assert root in {"torch", "transformers", "safetensors"} | sys.stdlib_module_names, (path.name, name)


def test_arrows_run_one_way(repository):
    source = repository / "src" / "recnmt_hf"
    # Below all rooms, and knowing none but the models.
    ground = {path.stem for path in source.glob("_*.py")} - {"__init__"}
    for room in ROOMS:
        for path in (source / room).rglob("*.py"):
            for level, name in imported(path):
                if level == 2 and name:
                    allowed = ARROWS[room] | (ground if room != "models" else set())
                    assert name.split(".")[0] in allowed, (path, name)
    for name in ground:
        for level, imports in imported(source / f"{name}.py"):
            assert level != 1 or imports.split(".")[0] in ground | {"models"}, (name, imports)


def test_nothing_checks_for_model_types_in_shared_files(repository):
    for path in (repository / "src" / "recnmt_hf" / "models").glob("*.py"):
        text = path.read_text()
        assert "model_type ==" not in text and not re.search(r"isinstance\([^)]*Config\)", text), path.name
