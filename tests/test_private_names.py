"""Other packages' private names: only those of the lists below are used, each for a reason, and none has gone stale."""

import ast
import importlib
import sys
import textwrap

import pytest


# Attributes and methods that begin with an underscore, read, called, or overridden in a subclass.
ATTRIBUTES = {
    # transformers.PreTrainedModel: what its guide to adding a model asks subclasses for.
    "_can_compile_fullgraph": "a model says whether generation with a static cache compiles",
    "_can_record_outputs": "a model says which layers' outputs are collected",
    "_init_weights": "a model initializes its modules here",
    "_is_hf_initialized": "marks parameters that were loaded and must not be initialized",
    "_no_split_modules": "a model says which layers stay on one device",
    "_supports_flash_attn": "a model says which kinds of attention it computes",
    "_supports_flex_attn": "a model says which kinds of attention it computes",
    "_supports_sdpa": "a model says which kinds of attention it computes",
    "_tied_weights_keys": "a model says which parameters are one",
    # argparse.HelpFormatter: what argparse's own formatters override.
    "_get_default_metavar_for_optional": "N, LANG and FILE in the help",
    "_get_help_string": "the defaults in the help",
    # transformers.PreTrainedModel: without a public counterpart.
    "_attn_implementation": "the kind of attention that was chosen, as read by the models of transformers",
    "_auto_class": "whether register_for_auto_class was called on a class",
    "_expand_inputs_for_generation": "beams share what the encoder gave, so it is not repeated",
    "_get_resized_embeddings": "source and target vocabularies are resized apart",
    "_get_resized_lm_head": "source and target vocabularies are resized apart",
    "_keys_to_ignore_on_save": "of tied parameters, those that are still equal are saved once",
    "_prepare_cache_for_generation": "a cache of the user's gets its recurrent layers before its past is recorded",
    "_supports_default_dynamic_cache": "graphs of ONNX have a cache of their own",
    "_upload_modified_files": "a push brings a card whose code runs",
    # transformers: configurations and caches.
    "_commit_hash": "the tokenizer is loaded from the same revision of a Hub repository as the model",
    "_layer_type": "a cache layer's name among the layer types of a configuration",
    # transformers.Pipeline: what its guide to adding a pipeline asks subclasses for.
    "_forward": "a pipeline's call of its model",
    "_load_feature_extractor": "a pipeline says which processors it loads",
    "_load_image_processor": "a pipeline says which processors it loads",
    "_load_processor": "a pipeline says which processors it loads",
    "_load_tokenizer": "a pipeline says which processors it loads",
    "_pipeline_calls_generate": "a pipeline says whether it generates",
    "_sanitize_parameters": "a pipeline sorts its arguments",
    # transformers.Trainer: it has no public methods for these steps.
    "_load_callback_state": "a resumed run keeps the patience that its recipe asks for",
    "_load_from_checkpoint": "sharded runs load embeddings that source and target share",
    "_load_optimizer_and_scheduler": "a resumed run keeps the learning rate that its recipe asks for",
    "_prepare_inputs": "batches are brought to the device of the model",
    "_save": "the target tokenizer is saved too",
    "_save_checkpoint": "a checkpoint counts once all of it is written",
    # accelerate.state.AcceleratorState.
    "_reset_state": "a refused run leaves none of its settings to the next one",
    # evaluate.Metric: what its guide to adding a metric asks subclasses for.
    "_compute": "a metric's computation",
    "_info": "a metric's description and columns",
    # sacrebleu.metrics.base.Metric: its methods for subclasses.
    "_SIGNATURE_TYPE": "what sacrebleu asks metrics for, so that its significance tests apply",
    "_aggregate_and_compute": "what sacrebleu asks metrics for, so that its significance tests apply",
    "_cache_references": "what sacrebleu asks metrics for, so that its significance tests apply",
    "_extract_corpus_statistics": "the sign test swaps single sentences of a corpus",
    "_compute_score_from_stats": "what sacrebleu asks metrics for, so that its significance tests apply",
    "_compute_segment_statistics": "what sacrebleu asks metrics for, so that its significance tests apply",
    "_extract_reference_info": "what sacrebleu asks metrics for, so that its significance tests apply",
    "_preprocess_segment": "what sacrebleu asks metrics for, so that its significance tests apply",
    # torch.
    "_assert_async": "an accelerator checks a condition without being waited for",
    "_version": "a weight that was packed is still the same",
    "_apply": "a table of sinusoids is computed again, and packed weights are dropped, when a module changes its type",
    "_backward_hooks": "whether reading a module's parameters equals calling it",
    "_backward_pre_hooks": "whether reading a module's parameters equals calling it",
    "_is_exporting_flag": "torch's public function is also true while torch.compile traces, in torch 2.11",
    "_dynamo": "the names of the compiler's backends; addresses that stay, for graphs of CUDA",
    "_forward_hooks": "whether reading a module's parameters equals calling it",
    "_forward_pre_hooks": "whether reading a module's parameters equals calling it",
    "_C": "where torch keeps the next but one",
    "_choose_qparams_per_tensor": "inputs of wide layers in int8 are rounded as by torch's own layers",
    "_are_functorch_transforms_active": "steps are not matched to their signature where no torch.func needs it",
    "_autograd": "where torch keeps the next",
    "_get_current_graph_task_keep_graph": "gradients take the place of what was saved, unless the graph is kept",
    "_last_lr": "a scheduler's report after its learning rate has been set anew",
    "_packed_params": "the weights of a quantized layer, whose method rounds its inputs to half of the levels",
    "_parameters": "whether reading a module's parameters equals calling it",
    "_reorder_linear_weight": "weights of many calls, put into oneDNN's order once",
    "_softmax_backward_data": "torch's own gradient of a softmax, for a backward pass that is written out",
    "_linear_pointwise": "oneDNN's linear layer, where torch's usual one leaves the processor half unused",
}

# Python's own that begin with an underscore and are documented: os._exit, and the methods of named tuples.
PUBLIC = {"_asdict", "_exit", "_fields", "_make", "_replace"}

# Private modules, and private names of modules.
IMPORTS = {
    "torch._higher_order_ops.scan": "loops over time in exported graphs",
    "torch.utils._python_dispatch": "whether operations are being counted or traced",
}

# Modules of transformers and datasets that their documentation describes ...
DOCUMENTED = {
    "datasets",
    "transformers",
    "transformers.cache_utils",
    "transformers.integrations",
    "transformers.masking_utils",
    "transformers.modeling_outputs",
    "transformers.modeling_utils",
    "transformers.pipelines",
    "transformers.trainer_pt_utils",
    "transformers.trainer_utils",
    "transformers.training_args",
    "transformers.utils",
}
# ... and those that it does not, but which are imported.
UNDOCUMENTED = {
    "datasets.arrow_writer": "writes corpora that do not fit into memory",
    "transformers.activations": "the table of activation functions by the names that configurations use",
    "transformers.dynamic_module_utils": "the code of a family is saved with a subclass that has none of its own",
    "transformers.modeling_layers": "the layer class that gradient checkpointing finds",
    "transformers.models.whisper.tokenization_whisper": "the English names of languages by their codes, for cards",
    "transformers.processing_utils": "Unpack, with which transformers types keyword arguments",
    "transformers.trainer_callback": "the class of callbacks that checkpoints keep",
    "transformers.utils.generic": "the decorator that fills a call's options from the configuration",
    "transformers.utils.output_capturing": "the decorator that collects what _can_record_outputs names",
}


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in PUBLIC


def definitions(tree):
    """Private names that a file itself defines: functions, classes, variables, attributes of its own objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        ):
            yield node.attr


def imports(tree):
    """Absolute imports, as module and imported name; the name is empty for `import module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module != "__future__":
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def private_imports(tree):
    """Dotted names of private modules, or of private names in modules."""
    for module, name in imports(tree):
        if any(map(is_private, module.split("."))):
            yield module
        elif is_private(name):
            yield f"{module}.{name}"


def private_attributes(tree, foreign):
    """
    Private names that belong to others: what the file reads without having defined it, and what it defines although a
    class of another package has it (`foreign`), which overrides it.
    """
    own = set(definitions(tree)) - foreign
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.FunctionDef):
            name = node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr", "setattr", "delattr")
            and isinstance(node.args[1], ast.Constant)
        ):
            name = node.args[1].value
        elif isinstance(node, ast.Constant) and node.value in foreign:
            name = node.value
        else:
            continue
        if is_private(name) and name not in own:
            yield name


@pytest.fixture(scope="module")
def trees(repository):
    """Syntax trees of all of the package's files, by path."""
    source = repository / "src"
    return {path.relative_to(source): ast.parse(path.read_text()) for path in sorted(source.rglob("*.py"))}


@pytest.fixture(scope="module")
def own(trees):
    """Private names that some file of the package defines; another may read them."""
    return {name for tree in trees.values() for name in definitions(tree) if is_private(name)}


@pytest.fixture(scope="module")
def foreign(trees):
    """Private names of all classes of other packages that the package's classes derive from."""
    names = set()
    for path in trees:
        module = importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__.startswith("recnmt_hf"):
                for base in value.__mro__:
                    if not base.__module__.startswith("recnmt_hf"):
                        names |= {name for name in vars(base) if is_private(name)}
    return names


def test_private_attributes_are_listed(trees, own, foreign):
    used = {}
    for path, tree in trees.items():
        for name in private_attributes(tree, foreign):
            if name in foreign or name not in own:
                used.setdefault(name, str(path))
    new = {f"{name} ({used[name]})" for name in used.keys() - ATTRIBUTES.keys()}
    assert not new, f"private names of other packages: {sorted(new)}; use a public one, or list it with the reason"
    assert sorted(ATTRIBUTES.keys() - used.keys()) == [], "no longer used: take them off the list"


def test_private_imports_are_listed(trees):
    used = {name: str(path) for path, tree in trees.items() for name in private_imports(tree)}
    new = {f"{name} ({used[name]})" for name in used.keys() - IMPORTS.keys()}
    assert not new, f"private modules or names: {sorted(new)}; use a public one, or list it with the reason"
    assert sorted(IMPORTS.keys() - used.keys()) == [], "no longer used: take them off the list"


def test_undocumented_modules_are_listed(trees):
    used = {}
    for path, tree in trees.items():
        for module, _ in imports(tree):
            if module.split(".")[0] in ("transformers", "datasets") and module not in DOCUMENTED:
                used.setdefault(module, str(path))
    new = {f"{name} ({used[name]})" for name in used.keys() - UNDOCUMENTED.keys()}
    assert not new, f"modules without documentation: {sorted(new)}; use a documented one, or list it with the reason"
    assert sorted(UNDOCUMENTED.keys() - used.keys()) == [], "no longer used: take them off the list"


def test_a_new_private_name_is_found(foreign):
    tree = ast.parse(
        textwrap.dedent(
            """
            from __future__ import annotations
            import torch._C
            from transformers.utils.hub import _api
            from .siblings import _own

            class Model(PreTrainedModel):
                _tied_weights_keys = {}
                _mine = 1

                def _init_weights(self, module):
                    self._own_state, self.public = 1, self._mine
                    return self._own_state + module._buffers + getattr(module, "_non_persistent_buffers_set")

                def _helper(self):
                    return self._helper().__class__, [_ for _ in ()], vars(self).get("_auto_class"), "_words"
            """
        )
    )
    assert set(private_imports(tree)) == {"torch._C", "transformers.utils.hub._api"}
    assert set(private_attributes(tree, foreign)) == {
        "_tied_weights_keys",
        "_init_weights",
        "_auto_class",
        "_buffers",
        "_non_persistent_buffers_set",
    }


def test_reasons_are_given():
    for reason in [*ATTRIBUTES.values(), *IMPORTS.values(), *UNDOCUMENTED.values()]:
        assert len(reason) > 10
    assert not DOCUMENTED & UNDOCUMENTED.keys()
    assert all(name.split(".")[0] not in sys.stdlib_module_names for name in IMPORTS)
