"""The configurations of all models: what their fields take and refuse, and what generic code asks them."""

import inspect
import json
import pickle
import re
from typing import Literal, get_args, get_origin

import pytest
from user_errors import rejects

from recnmt_hf import (
    BiARNTransformerConfig,
    GCNRNMTConfig,
    GRETConfig,
    NMTTransformerConfig,
    ONLSTMTransformerConfig,
    RNMTConfig,
    RPETransformerConfig,
    UserError,
    VRNMTConfig,
)
from recnmt_hf.families import FAMILIES
from recnmt_hf.models.configuration_seq2seq import LARGEST_SIZE, LARGEST_TABLE, MOST_LAYERS, Filled, Seq2SeqConfig


CONFIGS = [family.load_class("Config") for family in FAMILIES.values()]
WRONG = {
    bool: ("yes", 1, None),
    int: ("7", 1.5, True, -1, None, 2**24 + 8),
    int | None: ("7", 1.5, True, -1),
    Filled[int]: ("7", 1.5, True, -1),
    int | list[int] | None: ("7", 1.5, True, -1, [2, "7"], [2, True], [2, -1]),
    float | int: ("a", True, -0.1, 1, float("nan"), None),
    float | int | None: ("a", True, -0.1),
    float: ("a", 0.0, -1.0),
    str: ("nothing", 3, ["relu"]),
}
LISTS = {
    "alignment_head": (3, "01", ["1", 0], [True, 0], [0.5, 0]),
    "relation_conv_kernels": (3, [], [0], ["1"], [True]),
    "relation_conv_channels": (3, [], [0], ["1"], [True]),
    "gcn_directions": ("in", [], ["up"], ["in", "in"], [3]),
    "encoder_layer_types": ("onlstm", [], ["gru"], [3]),
    **dict.fromkeys(("kl_weight", "latent_free_bits"), ("a", True, -0.1, float("nan"), None)),  # 1 is allowed
}


def declared_fields(config_class):
    hints = {}
    for base in reversed(config_class.__mro__):
        if issubclass(base, Seq2SeqConfig):
            hints.update(base.__annotations__)
    constants = ("presets", "former_fields", "baseline_first", "is_encoder_decoder")
    return {name: hint for name, hint in hints.items() if name not in constants}


def is_choice(hint):
    return hint is str or get_origin(hint) is Literal or any(get_origin(part) is Literal for part in get_args(hint))


def documented_values(config_class):
    """The names in quotes of each field's documentation."""
    for base in config_class.__mro__:
        text = inspect.cleandoc(base.__doc__ or "") if issubclass(base, Seq2SeqConfig) else ""
        entries = re.split(r"\n {4}(?=\w+ \()", text)
        for entry in entries[1:]:
            for value in re.findall(r'`"(\w+)"`', entry.partition("\n\n")[0]):
                yield entry.split()[0], value


@pytest.mark.parametrize("config_class", CONFIGS)
def test_every_field_refuses_what_it_is_not(config_class):
    """Numbers in quotes, true where a number belongs, unknown names: rejected at creation and at assignment."""
    for name, hint in declared_fields(config_class).items():
        for value in LISTS.get(name) or WRONG[str if is_choice(hint) else hint]:
            with rejects(field=name):
                config_class(**{name: value})
    for name, value in (("d_model", "512"), ("dropout", 1.5), ("scale_embedding", 1), ("use_cache", None)):
        with rejects(field=name):
            setattr(config_class(), name, value)


@pytest.mark.parametrize("config_class", CONFIGS)
def test_every_documented_value_is_taken(config_class):
    named = [name for name, hint in declared_fields(config_class).items() if is_choice(hint)]
    values = [(name, value) for name, value in documented_values(config_class) if name in named]
    values.remove(("fusion_gate", "gated_sum")) if config_class is BiARNTransformerConfig else None  # the fusion's
    assert len(values) > 5
    for name, value in values:
        try:
            assert getattr(config_class(**{name: value}), name) == value
        except UserError as error:
            assert "is not allowed with" in str(error), (name, value)  # it needs another field


SEPARATE = {"share_encoder_decoder_embeddings": False}
# For each family fields that contradict each other, or are out of range, by the field that the error names.
CONTRADICTIONS = {
    NMTTransformerConfig: {
        "max_position_embeddings": [{"max_position_embeddings": LARGEST_TABLE // 512 + 1}],
        "decoder_vocab_size": [{"decoder_vocab_size": 7}],
        "decoder_attention_heads": [{"decoder_attention_heads": 6}],
        "alignment_head": [{"alignment_head": place} for place in ([], [5], [6, 0], [5, 8], [-1, 0])],
        "encoder_attention_heads": [{"self_attention_type": "directional", "encoder_attention_heads": 1}],
        "decoder_layers": [{"decoder_layers": MOST_LAYERS + 1}],
        "eos_token_id": [{**SEPARATE, "decoder_vocab_size": 7, "eos_token_id": [2, 7]}],
        "pad_token_id": [{**SEPARATE, "decoder_vocab_size": 7, "pad_token_id": 8}],
        "d_model": [{"d_model": 9, "encoder_attention_heads": 3, "decoder_attention_heads": 3}],
        "position_embedding_type": [{"decoder_autoregression": "ssru", "self_attention_type": "relative"}],
    },
    BiARNTransformerConfig: {
        "decoder_memory": [{"recurrence_encoder_type": None, "decoder_memory": "recurrence"}],
        "recurrence_initial_state": [{"recurrence_initial_state": "mean", "recurrence_hidden_size": 64}],
        "recurrence_hidden_size": [{"recurrence_direction_combination": "concat", "recurrence_hidden_size": 512}],
        "encoder_type": [{"encoder_type": "multi_column", "decoder_memory": "recurrence"}],
    },
    GRETConfig: {"routing_iterations": [{"routing_iterations": 10**6}]},
    RNMTConfig: {
        "connections_without_relations": [
            {"relation_layers": 0, "connections_without_relations": True, "encoder_rnn_layout": "concat"}
        ],
        "init_std": [{"init_std": 0.5}],
        "encoder_rnn_layout": [{"encoder_rnn_layout": "concat", "relation_layers": 1}],
        "relation_layers": [{"relation_layers": 3}],
        "relation_conv_channels": [{"relation_conv_channels": [5, 5]}],
        "relation_conv_kernels": [{"relation_conv_kernels": [3, 4], "relation_conv_channels": [5, 5]}],
        "decoder_layers": [{"decoder_layers": 2}],
        "init_uniform": [{"init_uniform": 0}],
        "relation_batch_norm": [{"relation_batch_norm": "always"}],
    },
    VRNMTConfig: {"latent_inference": [{"latent_inference": "sample", "latent_level": "sentence"}]},
    GCNRNMTConfig: {
        "encoder_layers": [{"encoder_type": "bow", "encoder_layers": 2}],
        "relation_layers": [{"encoder_type": "cnn", "encoder_rnn_layout": "stacked", "relation_layers": 1}],
        "connections_without_relations": [
            {"encoder_type": "bow", "encoder_rnn_layout": "stacked", "connections_without_relations": True}
        ],
        "cnn_kernel_size": [{"cnn_kernel_size": 4}],
    },
    ONLSTMTransformerConfig: {
        "encoder_layers": [{"encoder_layers": 3, "encoder_layer_types": ["lstm"]}],
        "onlstm_chunk_size": [{"onlstm_chunk_size": size} for size in (3, 512)],
        "encoder_shortcut": [
            {"encoder_shortcut": True, "encoder_layer_types": types}
            for types in (["attention", "onlstm"], ["onlstm", "onlstm"], ["attention"])
        ],
        "pair_pooling_heads": [{"pair_pooling": "attention", "pair_pooling_heads": 3}],
    },
    RPETransformerConfig: {
        "rpe_dim": [{"rpe_dim": 514}, {"rpe_dim": 30}, {"rpe_type": "rpehead", "rpe_dim": 48}],
        "rpe_head_partition": [
            {"rpe_head_partition": "typed"},
            {"rpe_head_partition": "slice", "rpe_type": None},
            {"rpe_head_partition": "slice", "decoder_autoregression": "ssru"},
        ],
        "rpe_recurrence": [{"rpe_cell": "sru", "rpe_recurrence": "projected"}],
    },
}


@pytest.mark.parametrize("config_class", CONTRADICTIONS)
def test_fields_that_contradict_each_other(config_class):
    for field, rows in CONTRADICTIONS[config_class].items():
        for fields in rows:
            with rejects(field=field) as caught:
                config_class(**fields)
            assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_the_largest_values_are_taken():
    NMTTransformerConfig(encoder_layers=MOST_LAYERS, vocab_size=LARGEST_SIZE, init_std=0)
    NMTTransformerConfig(max_position_embeddings=LARGEST_TABLE // 512)
    BiARNTransformerConfig(recurrence_encoder_layers=MOST_LAYERS, multi_column_rnn_layers=MOST_LAYERS)
    for name in ("relation_gp_layers", "relation_mlp_layers"):
        assert getattr(RNMTConfig(**{name: MOST_LAYERS}), name) == MOST_LAYERS
        with rejects(field=name):
            RNMTConfig(**{name: MOST_LAYERS + 1})


def test_configurations_of_earlier_releases_load(tmp_path):
    """Whole numbers for decimal ones, several ends, obsolete fields, and fields that nobody knows."""
    fields = {"model_type": "rnmt", "dropout": 0, "readout_dropout": 0, "eos_token_id": [2, 3], "unknown": [1]}
    fields |= {"encoder_attention_heads": None, "activation_function": 3, "init_std": None, "init_uniform": 1}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = RNMTConfig.from_pretrained(tmp_path)
    assert (config.dropout, config.eos_token_id, config.unknown) == (0, [2, 3], [1])
    assert not hasattr(config, "activation_function")
    assert RNMTConfig(relation_conv_kernels=(1, 3), relation_conv_channels=(2, 4)).relation_conv_kernels == (1, 3)
    assert ONLSTMTransformerConfig(encoder_layer_types=("lstm", "attention")).encoder_layer_types[0] == "lstm"


def test_a_subclass_needs_no_decorator():
    """Its own fields are not checked, inherited ones are, whether it changes their defaults or not."""

    class Own(NMTTransformerConfig):
        model_type = "own"
        dropout: float = 0.3
        own_size: list = None

    assert Own().dropout == 0.3 and Own(own_size=7).own_size == 7
    for field, value in (("dropout", 1), ("d_model", "x")):
        with rejects(field=field):
            Own(**{field: value})
    with rejects(field="encoder_attention_heads"):
        Own(encoder_attention_heads=7)


def test_what_is_left_out_follows_from_the_rest():
    halves = {"d_model": 64, "recurrence_direction_combination": "concat"}
    assert BiARNTransformerConfig(**halves).recurrence_hidden_size == 32
    assert isinstance(BiARNTransformerConfig(**halves).recurrence_hidden_size, int)
    assert BiARNTransformerConfig(**halves, recurrence_encoder_type="arn").recurrence_hidden_size == 64
    assert GRETConfig(d_model=64, encoder_attention_heads=1).capsule_dim == 64
    assert GRETConfig(d_model=8, encoder_attention_heads=8).capsule_dim == 1
    assert GRETConfig(d_model=64, capsule_projection="shared").capsule_dim == 64
    for fields, expected in (
        ({}, ("stacked", 2, 2)),
        ({"relation_layers": 0}, ("stacked", 2, 0)),
        ({"relation_layers": 0, "decoder_type": "rnnsearch"}, ("concat", 1, 0)),
        ({"decoder_type": "rnnsearch"}, ("stacked", 2, 2)),
        ({"encoder_rnn_layout": "concat"}, ("concat", 1, 0)),
        ({"encoder_layers": 1}, ("stacked", 1, 1)),
        ({"encoder_layers": 4}, ("stacked", 4, 2)),
    ):
        config = RNMTConfig(**fields)
        assert (config.encoder_rnn_layout, config.encoder_layers, config.relation_layers) == expected


def test_a_baseline_has_the_fields_that_it_shares_with_its_variant():
    shared = {"d_model": 24, "encoder_attention_heads": 6, "vocab_size": 91, "max_relative_positions": 5}
    for variant in (
        BiARNTransformerConfig(**shared),
        BiARNTransformerConfig(**shared, recurrence_encoder_type=None, encoder_type="multi_column"),
        GRETConfig(**shared),
    ):
        baseline = variant.baseline()
        assert type(baseline) is NMTTransformerConfig
        assert {name: getattr(baseline, name) for name in shared} == shared and baseline.baseline() is None
    assert BiARNTransformerConfig(recurrence_encoder_type=None).baseline() is None
    assert GRETConfig(use_global_state=False).baseline() is None
    baseline = RNMTConfig(readout="tanh", relation_layers=1).baseline()
    assert baseline.readout == "tanh" and baseline.relation_layers == 0 and baseline.baseline() is None


def test_the_views_of_a_configuration():
    """`generate` counts target symbols by the view of no side; caches take the decoder's; tools ask for either."""
    separate = NMTTransformerConfig(
        **SEPARATE, vocab_size=50, decoder_vocab_size=60, encoder_layers=3, decoder_layers=4
    )
    assert separate.get_text_config().vocab_size == separate.get_text_config(decoder=True).vocab_size == 60
    assert separate.get_text_config(encoder=True).vocab_size == 50
    shared = NMTTransformerConfig()
    assert shared.get_text_config() is shared
    assert not hasattr(NMTTransformerConfig().get_text_config(decoder=True), "layer_types")
    assert RNMTConfig().get_text_config(decoder=True).layer_types == ["recnmt_recurrent"]
    assert BiARNTransformerConfig(decoder_position_embeddings=False).sides_with_positions == ("source",)
    assert NMTTransformerConfig(position_embedding_type="none").sides_with_positions == ()


def test_a_subclass_is_saved_as_it_is(tmp_path):
    """With arguments of transformers; a class that is registered nowhere keeps its own."""

    class Own(NMTTransformerConfig):
        pass

    config = Own(d_model=24, encoder_attention_heads=6, decoder_attention_heads=6)
    config.save_pretrained(tmp_path)
    assert type(config) is Own and Own.from_pretrained(tmp_path).d_model == 24
    names = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert names["AutoConfig"] == "configuration_nmt_transformer.NMTTransformerConfig"
    assert (tmp_path / "configuration_nmt_transformer.py").is_file()
    plain = Seq2SeqConfig(d_model=24)
    plain.save_pretrained(tmp_path / "plain")
    assert type(plain) is Seq2SeqConfig
