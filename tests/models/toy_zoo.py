"""
The toys as their files would stand in the zoo: one flat folder with everything that travels to the Hub.

    from toy_zoo import zoo
    config_class, model_class = zoo("gru_toy", "GRUToy")
"""

import atexit
import importlib
import shutil
import sys
import tempfile
from pathlib import Path

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

import recnmt_hf.models.user_errors


TOYS = Path(__file__).parent / "toys"
PACKAGE = "recnmt_toy_zoo"


def build_zoo():
    """Copies the zoo's model files and the toys' into a package of their own, and puts it on the path."""
    root = Path(tempfile.mkdtemp(prefix="recnmt_toys_"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    (root / PACKAGE).mkdir()
    for folder in (Path(recnmt_hf.models.__file__).parent, TOYS):
        for file in folder.glob("*.py"):
            shutil.copy(file, root / PACKAGE)
    sys.path.insert(0, str(root))
    # An error is of one class, whoever raises it.
    sys.modules[f"{PACKAGE}.user_errors"] = recnmt_hf.models.user_errors


def zoo(model_type, prefix):
    """Configuration and generating class of a toy, registered as a row of the zoo's table is."""
    if PACKAGE not in sys.modules:
        build_zoo()
    config_class = getattr(importlib.import_module(f"{PACKAGE}.configuration_{model_type}"), f"{prefix}Config")
    module = importlib.import_module(f"{PACKAGE}.modeling_{model_type}")
    model_class = getattr(module, f"{prefix}ForConditionalGeneration")
    AutoConfig.register(model_type, config_class, exist_ok=True)
    AutoModel.register(config_class, getattr(module, f"{prefix}Model"), exist_ok=True)
    AutoModelForSeq2SeqLM.register(config_class, model_class, exist_ok=True)
    return config_class, model_class
