"""The configurations of all models: what their fields take and refuse, and what generic code asks them."""

import json
import re

import pytest

from recnmt_hf import (
    BiARNTransformerConfig,
    GRETConfig,
    NMTTransformerConfig,
    ONLSTMTransformerConfig,
    RNMTConfig,
    RPETransformerConfig,
    UserError,
)
from recnmt_hf.models.configuration_seq2seq import (
    LARGEST_SIZE,
    LARGEST_TABLE,
    MOST_LAYERS,
    Filled,
    Seq2SeqConfig,
)


CONFIGS = [
    NMTTransformerConfig,
    BiARNTransformerConfig,
    GRETConfig,
    ONLSTMTransformerConfig,
    RNMTConfig,
    RPETransformerConfig,
]
WRONG = {
    bool: ("yes", 1),
    int: ("7", 1.5, True, -1),
    int | None: ("7", 1.5, -1),
    float | int: ("a", True, -0.1, 1),
    float | None: ("a", -0.1),
    float: ("a", 0.0, -1.0),
    str: ("nothing", 3),
    Filled[str]: ("nothing", 3),
    Filled[list[int]]: (3, [], [0], ["1"], [True]),
    Filled[list[str]]: ("onlstm", [], ["gru"], [3]),
}
RIGHT = {
    bool: r"True or False\. Remedy: write a Python bool \(true/false in JSON and YAML\)\.",
    int: r"a whole number >= [01]\. Remedy: use [01] or more\.",
    int | None: (
        r"(None or an id from 0 to \d+\. Remedy: take it from the tokenizer, or enlarge vocab_size"
        r"|a whole number >= 1, or None for the length of the sentence\. Remedy: use 8 \(None is written null in YAML "
        r"and JSON\)|a whole number >= [01]\. Remedy: use [01] or more)\."
    ),
    float | int: r"a number from 0 to below 1\. Remedy: 0\.1 is usual, 0 switches it off\.",
    float | None: (
        r"None or a number (>= 0\. Remedy: leave it out for Xavier-uniform initialisation"
        r"|> 0\. Remedy: use 0\.1, or None for other initialisations)\."
    ),
    float: r"a number > 0\. Remedy: use 1e-5\.",
    str: (
        r"(one of ('\w+'|None)(, '\w+'|, None)+\. Remedy: choose one of them"
        r'|a name in transformers\.activations\.ACT2FN\. Remedy: use "relu" or "gelu")\.'
    ),
    Filled[
        list[int]
    ]: r"a list of whole numbers >= 1\. Remedy: write one number for each convolution, e\.g\. \[1, 3\]\.",
}
RIGHT[Filled[list[str]]] = r"a list of ('\w+'(, )?)+\. Remedy: name each layer, the bottom one first\."
RIGHT[Filled[str]] = RIGHT[str]


def declared_fields(config_class):
    hints = {}
    for base in reversed(config_class.__mro__):
        if issubclass(base, Seq2SeqConfig):
            hints.update(base.__annotations__)
    constants = ("presets", "former_fields", "baseline_first", "is_encoder_decoder")
    return {name: hint for name, hint in hints.items() if name not in constants}


def documented_values(config_class):
    """The names in quotes of each field's documentation."""
    for base in config_class.__mro__:
        entries = re.split(r"\n {8}(?=\w+ \()", (base.__doc__ or "") if issubclass(base, Seq2SeqConfig) else "")
        for entry in entries[1:]:
            for value in re.findall(r'`"(\w+)"`', entry.partition("\n\n")[0]):
                yield entry.split()[0], value


@pytest.mark.parametrize("config_class", CONFIGS)
def test_every_field_refuses_what_it_is_not(config_class):
    """Numbers in quotes, true where a number belongs, unknown names: refused with field, value and remedy."""
    for name, hint in declared_fields(config_class).items():
        hint = int | None if name == "eos_token_id" else str if name == "recurrence_encoder_type" else hint
        for value in WRONG[hint]:
            start = re.escape(f"{config_class.__name__}: {name}={value!r} is not allowed; it must be ")
            with pytest.raises(UserError, match=f"^{start}{RIGHT[hint]}$"):
                config_class(**{name: value})


@pytest.mark.parametrize("config_class", CONFIGS)
def test_every_documented_value_is_taken(config_class):
    named = [name for name, hint in declared_fields(config_class).items() if hint in (str, str | None, Filled[str])]
    values = [(name, value) for name, value in documented_values(config_class) if name in named]
    values.remove(("fusion_gate", "gated_sum")) if config_class is BiARNTransformerConfig else None  # the fusion's
    assert len(values) > 5
    for name, value in values:
        try:
            assert getattr(config_class(**{name: value}), name) == value
        except UserError as error:
            assert "while" in str(error), (name, value)  # it needs another field


SEPARATE = {"share_encoder_decoder_embeddings": False}
REFUSED = [
    (
        NMTTransformerConfig,
        {"d_model": 2**24 + 8},
        "d_model=16777224 is not allowed; it must be at most 16777216. Remedy: see whether a digit is too many.",
    ),
    (
        NMTTransformerConfig,
        {"decoder_layers": MOST_LAYERS + 1},
        "decoder_layers=1001 is not allowed; it must be at most 1000. Remedy: see whether a digit is too many.",
    ),
    (
        NMTTransformerConfig,
        {"max_position_embeddings": LARGEST_TABLE // 512 + 1},
        "max_position_embeddings=2097153 is not allowed; it must be at most 2097152 with d_model=512. Remedy: use as "
        "many positions as the longest sentence has tokens.",
    ),
    (
        NMTTransformerConfig,
        {"decoder_vocab_size": 7},
        "decoder_vocab_size=7 is not allowed; it must be vocab_size=32000 while share_encoder_decoder_embeddings=True. "
        "Remedy: set share_encoder_decoder_embeddings=False for separate vocabularies.",
    ),
    (
        NMTTransformerConfig,
        {**SEPARATE, "decoder_vocab_size": 7, "eos_token_id": [2, 7]},
        "eos_token_id=[2, 7] is not allowed; it must be None or an id from 0 to 6. Remedy: take it from the tokenizer, "
        "or enlarge vocab_size.",
    ),
    (
        NMTTransformerConfig,
        {**SEPARATE, "decoder_vocab_size": 7, "pad_token_id": 8},
        "pad_token_id=8 is not allowed; it must be None or an id from 0 to 6. Remedy: take it from the tokenizer, or "
        "enlarge vocab_size.",
    ),
    (
        NMTTransformerConfig,
        {"decoder_attention_heads": 6},
        "decoder_attention_heads=6 is not allowed; it must be a divisor of d_model=512. Remedy: change "
        "decoder_attention_heads or d_model so that each head has the same width.",
    ),
    (
        NMTTransformerConfig,
        {"d_model": 9, "encoder_attention_heads": 3, "decoder_attention_heads": 3},
        "d_model=9 is not allowed; it must be an even number (sines and cosines come in pairs). Remedy: use an even "
        "width.",
    ),
    (
        NMTTransformerConfig,
        {"self_attention_type": "directional", "encoder_attention_heads": 1},
        'encoder_attention_heads=1 is not allowed; it must be even while self_attention_type="directional" (half look '
        "back, half ahead). Remedy: use an even number of heads.",
    ),
    (
        BiARNTransformerConfig,
        {"recurrence_encoder_type": None, "decoder_memory": "recurrence"},
        "decoder_memory='recurrence' is not allowed; it must be \"both\" while recurrence_encoder_type=None. Remedy: "
        "name a recurrence encoder, or leave decoder_memory out.",
    ),
    (
        BiARNTransformerConfig,
        {"recurrence_initial_state": "mean", "recurrence_hidden_size": 64},
        'recurrence_initial_state=\'mean\' is not allowed; it must be "mean_linear" or "zeros" while '
        'recurrence_hidden_size=64 differs from d_model=512. Remedy: use "mean_linear", or set '
        "recurrence_hidden_size=512.",
    ),
    (
        BiARNTransformerConfig,
        {"recurrence_direction_combination": "concat", "recurrence_hidden_size": 512},
        "recurrence_hidden_size=512 is not allowed; it must be d_model / 2 = 256 with "
        'recurrence_direction_combination="concat". Remedy: set recurrence_hidden_size=256 (presets name their own), '
        'or use recurrence_direction_combination="project".',
    ),
    (
        BiARNTransformerConfig,
        {"encoder_type": "multi_column", "decoder_memory": "recurrence"},
        'encoder_type=\'multi_column\' is not allowed; it must be "transformer" while decoder_memory="recurrence": '
        'nothing would read the merged columns. Remedy: leave encoder_type out, or use recurrence_source="encoder".',
    ),
    (
        GRETConfig,
        {"routing_iterations": 10**6},
        "routing_iterations=1000000 is not allowed; it must be at most 100. Remedy: see whether a digit is too many.",
    ),
    (
        RNMTConfig,
        {"relation_layers": 0, "connections_without_relations": True, "encoder_rnn_layout": "concat"},
        'connections_without_relations=True is not allowed; it must be False while encoder_rnn_layout="concat", whose '
        'outputs are twice as wide as its inputs. Remedy: leave it out, or set encoder_rnn_layout="stacked".',
    ),
    (
        RNMTConfig,
        {"decoder_layers": 2},
        "decoder_layers=2 is not allowed; it must be 1. Remedy: leave it out: the decoder is one recurrence.",
    ),
    (
        RNMTConfig,
        {"init_uniform": 0},
        "init_uniform=0 is not allowed; it must be None or a number > 0. Remedy: use 0.1, or None for other "
        "initialisations.",
    ),
    (
        RNMTConfig,
        {"init_std": 0.5},
        "init_std=0.5 is not allowed; it must be None while init_uniform=0.1. Remedy: set init_uniform=None (null in "
        "YAML).",
    ),
    (
        RNMTConfig,
        {"encoder_rnn_layout": "concat", "relation_layers": 1},
        "encoder_rnn_layout='concat' is not allowed; it must be \"stacked\" while relation_layers=1. Remedy: leave it "
        "out, or set relation_layers=0 for a baseline without them.",
    ),
    (
        RNMTConfig,
        {"relation_layers": 3},
        "relation_layers=3 is not allowed; it must be at most encoder_layers=2: each one follows a recurrent layer. "
        "Remedy: use fewer, or more encoder_layers.",
    ),
    (
        RNMTConfig,
        {"relation_conv_kernels": [3, 4], "relation_conv_channels": [5, 5]},
        "relation_conv_kernels=[3, 4] is not allowed; it must be odd widths (a word has as many on either side). "
        "Remedy: use 1, 3 or 5.",
    ),
    (
        RNMTConfig,
        {"relation_conv_channels": [5, 5]},
        "relation_conv_channels=[5, 5] is not allowed; it must be as long as relation_conv_kernels=[3]. Remedy: give "
        "each convolution a width and a number of channels.",
    ),
]


@pytest.mark.parametrize(
    ("config_class", "fields", "message"), REFUSED, ids=[message.partition(" ")[0] for _, _, message in REFUSED]
)
def test_what_does_not_go_together_is_refused(config_class, fields, message):
    with pytest.raises(UserError) as error:
        config_class(**fields)
    assert str(error.value) == f"{config_class.__name__}: {message}"


def test_the_largest_values_are_taken():
    NMTTransformerConfig(encoder_layers=MOST_LAYERS, vocab_size=LARGEST_SIZE, init_std=0)
    NMTTransformerConfig(max_position_embeddings=LARGEST_TABLE // 512)
    BiARNTransformerConfig(recurrence_encoder_layers=MOST_LAYERS, multi_column_rnn_layers=MOST_LAYERS)
    for name in ("relation_gp_layers", "relation_mlp_layers"):
        assert getattr(RNMTConfig(**{name: MOST_LAYERS}), name) == MOST_LAYERS
        with pytest.raises(UserError, match=f"{name}=1001 is not allowed; it must be at most 1000"):
            RNMTConfig(**{name: MOST_LAYERS + 1})


def test_what_is_left_out_follows_from_the_rest():
    halves = {"d_model": 64, "recurrence_direction_combination": "concat"}
    assert BiARNTransformerConfig(**halves).recurrence_hidden_size == 32
    assert isinstance(BiARNTransformerConfig(**halves).recurrence_hidden_size, int)
    assert BiARNTransformerConfig(**halves, recurrence_encoder_type="arn").recurrence_hidden_size == 64
    assert GRETConfig(d_model=64, encoder_attention_heads=1).capsule_dim == 64
    assert GRETConfig(d_model=8, encoder_attention_heads=8).capsule_dim == 1
    assert GRETConfig(d_model=64, capsule_projection="shared").capsule_dim == 64


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
