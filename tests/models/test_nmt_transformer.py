"""The base Transformer: the contract, and its own equations against a slow reference."""

import json

import pytest
import torch
from compiled_graphs import ALL_LENGTHS, MOST_LENGTHS
from gradients import LargestTensor
from model_contract import TINY, VOCABULARY, ModelContract, ragged_batch, scatter_parameters, source_of
from safetensors.torch import load_file, save_file
from slow_transformer import SlowTransformer, compare, multiply_instead_of_dropping, name_fields
from torch.nn.attention.flex_attention import flex_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from user_errors import rejects

import recnmt_hf
from recnmt_hf import NMTTransformerConfig, NMTTransformerForConditionalGeneration
from recnmt_hf.models import seq2seq_loading
from recnmt_hf.models.attention import eager_attention_forward
from recnmt_hf.models.modeling_nmt_transformer import RelativeMultiHeadAttention
from recnmt_hf.models.seq2seq_loading import Initialization


class TestNMTTransformer(ModelContract):
    config_class = NMTTransformerConfig
    model_class = NMTTransformerForConditionalGeneration
    compiled = {"lengths": ALL_LENGTHS, "larger": 6}
    compiled_variants = {"lengths": MOST_LENGTHS, "dynamic": True}
    variants = {
        "default": {},
        "pre-norm": {"normalize_before": True, "activation_function": "gelu"},
        "learned": {"position_embedding_type": "learned"},
        "relative": {"self_attention_type": "relative", "max_relative_positions": 3},
        "directional": {"self_attention_type": "directional"},
    }


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"normalize_before": True},
        {"position_embedding_type": "marian", "scale_embedding": True},
        {"position_embedding_type": "tensor2tensor"},
        {"encoder_position_embeddings": False, "decoder_position_embeddings": False},
        {"self_attention_type": "relative", "max_relative_positions": 2},
        {"self_attention_type": "relative", "max_relative_positions": 2, "relative_per_head": False},
        {"self_attention_type": "directional"},
        {"self_attention_type": "directional", "directional_include_self": True},
        {"scale_embedding": False, "encoder_layers": 1, "decoder_layers": 3, "decoder_attention_heads": 2},
        {"encoder_ffn_dim": 40, "decoder_ffn_dim": 56, "encoder_attention_heads": 8},
    ],
    ids=name_fields,
)
def test_equations(fields):
    """Every sentence of a padded batch against the equations, to 1e-10."""
    check_equations(TestNMTTransformer().model({"layer_norm_eps": 0.1, **fields}))


@pytest.mark.parametrize("fields", [{}, {"self_attention_type": "relative", "normalize_before": True}], ids=name_fields)
def test_dropout_stands_where_the_equations_have_it(fields, monkeypatch):
    """After the embeddings, each sub-layer, the activation and the softmax (Vaswani et al., 2017, section 5.4)."""
    multiply_instead_of_dropping(monkeypatch)
    fields = {"dropout": 0.2, "attention_dropout": 0.3, "activation_dropout": 0.5, **fields}
    model = TestNMTTransformer().model(fields).train()
    model.set_attn_implementation("eager")
    check_equations(model)


def check_equations(model):
    assert len(list(compare(model, SlowTransformer(model)))) == 3


@pytest.mark.parametrize("per_head", [True, False])
def test_tables_of_relative_positions(per_head):
    """One for each head or one for all, with 2 k + 1 rows; deviation of a head's width."""
    torch.manual_seed(3)
    fields = {"self_attention_type": "relative", "max_relative_positions": 50, "relative_per_head": per_head}
    attention = RelativeMultiHeadAttention(TestNMTTransformer().config(**fields), 64, 4)
    attention.initialize(Initialization(64))
    for table in (attention.relative_keys, attention.relative_values):
        assert table.shape == (4 if per_head else 1, 101, 16)
        assert abs(table.std() * 4 - 1) < 0.1


def test_relative_attention_makes_no_pairwise_vectors():
    """No tensor of query x key x head width appears on the way, forward or backward."""
    config = TestNMTTransformer().config(self_attention_type="relative", max_relative_positions=3)
    config._attn_implementation = "sdpa"
    attention = RelativeMultiHeadAttention(config, 32, 4)
    torch.nn.init.normal_(attention.relative_keys)
    torch.nn.init.normal_(attention.relative_values)
    with LargestTensor() as largest:
        attention(torch.randn(1, 50, 32))[0].sum().backward()
    assert largest.nbytes <= 4 * 50 * 50 * 4  # scores of four heads, nothing eight times as wide


def test_sequences_beyond_the_position_table_are_refused():
    model = TestNMTTransformer().model({"max_position_embeddings": 8})
    long = torch.full((1, 9), 5)
    with rejects(field="max_position_embeddings"):
        model(long, decoder_input_ids=long[:, :2])
    with rejects(field="max_position_embeddings"):
        model.generate(long[:, :2], min_new_tokens=9, max_new_tokens=9)
    free = TestNMTTransformer().model({"max_position_embeddings": 8, "self_attention_type": "relative"})
    assert free(long, decoder_input_ids=long).logits.shape == (1, 9, VOCABULARY)


def test_attention_kernels_that_do_not_fit_are_refused():
    for kind in ("relative", "directional"):
        config = TestNMTTransformer().config(self_attention_type=kind)
        with rejects(field="attn_implementation"):
            NMTTransformerForConditionalGeneration._from_config(config, attn_implementation="flex_attention")
        model = NMTTransformerForConditionalGeneration._from_config(config, attn_implementation="eager")
        for implementation in ("flex_attention", "flash_attention_2"):
            with pytest.raises((ValueError, ImportError)):
                model.set_attn_implementation(implementation)
        assert model.config._attn_implementation == "eager"
    config = TestNMTTransformer().config()
    NMTTransformerForConditionalGeneration._from_config(config, attn_implementation="flex_attention")


@pytest.mark.parametrize("called", [False, True], ids=["read", "called"])
def test_losses_agree_with_a_bias_of_the_logits_and_a_given_divisor(called):
    """With logits and without; where the output layer's matrix is read, and where the layer has to be called."""
    model = TestNMTTransformer().model({"final_logits_bias": True})
    assert not model.final_logits_bias.any() and TestNMTTransformer().model({}).final_logits_bias is None
    batch = ragged_batch()
    plain = model(**batch).logits
    model.final_logits_bias.normal_(std=2)
    if called:
        model.lm_head.register_forward_hook(lambda module, args, output: output.clone())
    for smoothing in (0.0, 0.1):
        settings = {"smoothing": smoothing, "num_items_in_batch": 17}
        outputs = model(**batch, **settings)
        torch.testing.assert_close(outputs.logits, plain + model.final_logits_bias)
        without = model(**batch, **settings, return_logits=False)
        assert without.logits is None
        torch.testing.assert_close(without.loss, outputs.loss)
        torch.testing.assert_close(outputs.loss * 17 / 10, model(**batch, smoothing=smoothing).loss)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "separate"])
def test_the_bias_of_the_logits_is_resized(share):
    model = TestNMTTransformer().model({"final_logits_bias": True, "share_encoder_decoder_embeddings": share})
    resize = model.resize_token_embeddings if share else model.resize_decoder_token_embeddings
    model.final_logits_bias.normal_()
    kept = model.final_logits_bias.clone()
    for size in (VOCABULARY + 3, VOCABULARY - 2):
        resize(size)
        assert model.final_logits_bias.shape == (1, size)
        assert torch.equal(model.final_logits_bias[:, : VOCABULARY - 2], kept[:, : VOCABULARY - 2])
        assert not model.final_logits_bias[:, VOCABULARY:].any()
        ids = torch.full((1, 2), 5)
        assert model(ids, decoder_input_ids=ids).logits.shape == (1, 2, size)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "separate"])
def test_padding_starts_at_zero_and_is_not_trained(share):
    fields = {"share_encoder_decoder_embeddings": share, "tie_word_embeddings": False}
    model = TestNMTTransformer().model(fields, torch.float32, scattered=False)
    batch = ragged_batch()
    batch["input_ids"] = batch["input_ids"] * batch["attention_mask"]
    model(input_ids=batch["input_ids"], labels=batch["labels"]).loss.backward()
    for side in (model.model.encoder, model.model.decoder):
        weight = side.embed_tokens.weight
        assert not weight[0].any() and not weight.grad[0].any() and weight.grad[4:].any()


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["NMTTransformer", "BiARNTransformer"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_equals_sdpa(prefix, monkeypatch):
    """Its kernel's own reference, uncompiled: padding and beams (transformers takes no static cache with it)."""
    monkeypatch.setattr(
        "transformers.integrations.flex_attention.compile_friendly_flex_attention",
        lambda query, key, value, training=False, **kwargs: flex_attention(query, key, value, **kwargs),
    )
    check_kernel(prefix, "flex_attention")


@pytest.mark.parametrize("prefix", ["NMTTransformer", "GRET"])
def test_flash_attention_reads_no_memory(prefix, monkeypatch):
    """
    It applies its token mask to the queries too, so it can compute self-attention only. A substitute kernel takes such
    masks here.
    """

    def flash(module, query, key, value, attention_mask, is_causal=None, **kwargs):
        assert module.memory is None and (attention_mask is None or attention_mask.shape == key.shape[::2])
        mask = None if attention_mask is None else attention_mask[:, None, None].bool()
        if is_causal and query.shape[2] > 1:
            causal = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
            mask = causal if mask is None else causal & mask
        return eager_attention_forward(module, query, key, value, mask, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", flash)
    check_kernel(prefix, "flash_attention_2")


def check_kernel(prefix, kernel):
    """Logits and translations are those of sdpa."""
    config = getattr(recnmt_hf, f"{prefix}Config")(**{**TINY, "d_model": 64})
    model = scatter_parameters(getattr(recnmt_hf, f"{prefix}ForConditionalGeneration")(config).eval(), 0.1)
    batch, found = ragged_batch(), []
    with torch.no_grad():
        for implementation in ("sdpa", kernel):
            model.config._attn_implementation = implementation
            tokens = [model.generate(**source_of(batch), num_beams=beams, max_new_tokens=5) for beams in (1, 3)]
            found.append((model(**batch).logits, *tokens))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def test_a_warm_start_reports_what_it_did(monkeypatch, tmp_path):
    """From a folder, and from model ids of the Hub, with one file or with shards."""
    baseline = TestNMTTransformer().model({"encoder_layers": 1, "decoder_layers": 1}, torch.float32)
    hub = tmp_path / "hub"
    baseline.save_pretrained(hub / "somebody/whole")
    baseline.save_pretrained(hub / "somebody/shards", max_shard_size="10KB")
    assert len(list((hub / "somebody/shards").glob("*.safetensors"))) > 1
    monkeypatch.setattr(seq2seq_loading, "snapshot_download", lambda name, **options: str(hub / name))
    fields = {"encoder_layers": 1, "decoder_layers": 1, "position_embedding_type": "learned"}
    for source in (hub / "somebody/whole", "somebody/whole", "somebody/shards"):
        model = TestNMTTransformer().model(fields, torch.float32)
        report = model.init_from_baseline(source)
        assert torch.equal(model.model.shared.weight, baseline.model.shared.weight)
        fresh = [f"model.{side}.embed_input.embed_positions.weight" for side in ("encoder", "decoder")]
        assert report.fresh == fresh and report.unused == []
        assert str(report) == f"copied {len(report.copied)} parameters, left 2 fresh ({', '.join(fresh)})"
    for ties in ({"share_encoder_decoder_embeddings": False}, {"tie_word_embeddings": False}):
        untied = TestNMTTransformer().model({"encoder_layers": 1, "decoder_layers": 1, **ties}, torch.float32)
        report = untied.init_from_baseline(hub / "somebody/whole")  # which has the matrix once
        assert report.fresh == report.unused == []
        assert torch.equal(untied.lm_head.weight, baseline.model.shared.weight)
    report = baseline.init_from_baseline(model)
    assert set(report.unused) == set(fresh)
    unused = f"did not use 2 ({', '.join(report.unused)})"
    assert str(report) == f"copied {len(report.copied)} parameters, left 0 fresh, {unused}"


def test_a_checkpoint_may_hold_a_shared_matrix_under_any_of_its_names(tmp_path):
    model = TestNMTTransformer().model({}, torch.float32)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert not set(model._tied_weights_keys) & set(tensors) and model._keys_to_ignore_on_save
    matrix = tensors.pop("model.shared.weight")
    for name in model._tied_weights_keys:
        save_file({**tensors, name: matrix}, tmp_path / "model.safetensors", {"format": "pt"})
        loaded, report = NMTTransformerForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
        assert not report["missing_keys"] and torch.equal(loaded.model.shared.weight, matrix), name


def test_a_saved_folder_keeps_the_code_that_its_configuration_names(tmp_path):
    model = TestNMTTransformer().model({}, torch.float32)
    own = {"AutoTokenizer": ["tokenization.OwnTokenizer", None]}
    model.config.auto_map = dict(own)
    model.model.save_pretrained(tmp_path)
    names = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert names.items() >= own.items()
    assert names["AutoModelForSeq2SeqLM"] == "modeling_nmt_transformer.NMTTransformerForConditionalGeneration"
    assert names["AutoModel"] == "modeling_nmt_transformer.NMTTransformerModel"


@pytest.mark.parametrize("bare", [True, False], ids=["bare", "with-output"])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "separate"])
def test_new_rows_follow_the_arguments_of_resizing(share, bare):
    """Padded to a multiple; drawn around the mean of the old rows, or as a new model's."""
    spread = {}
    for mean_resizing in (True, False):
        model = TestNMTTransformer().model({"share_encoder_decoder_embeddings": share}, torch.float32)
        model = model.model if bare else model
        resized = model.resize_token_embeddings(VOCABULARY + 2, pad_to_multiple_of=16, mean_resizing=mean_resizing)
        assert resized.num_embeddings == model.config.vocab_size == 48
        spread[mean_resizing] = float(resized.weight[VOCABULARY:].detach().std(dim=0).mean())
    assert spread[True] < 0.01 < 0.1 < spread[False]


def test_classes_that_are_sharded_whole_are_those_that_a_model_has():
    for fields in ({}, {"encoder_layers": 1}):
        model = TestNMTTransformer().model(fields)
        assert set(model._no_split_modules) == {"TransformerEncoderLayer", "TransformerDecoderLayer"}
    config = recnmt_hf.BiARNTransformerConfig(**TINY, recurrence_encoder_type=None)
    model = recnmt_hf.BiARNTransformerForConditionalGeneration(config)
    assert set(model._no_split_modules) == {"TransformerEncoderLayer", "TransformerDecoderLayer"}


def test_generation_while_training_with_gradient_checkpointing():
    """Without gradients there is nothing to checkpoint, so that the cache is used, as in `eval()`."""
    torch.manual_seed(0)
    config = NMTTransformerConfig.from_preset("tiny", vocab_size=60, dropout=0.0)
    model = NMTTransformerForConditionalGeneration(config)
    for parameter in model.parameters():
        parameter.data *= 4
    source = torch.randint(4, 60, (3, 7))
    expected = model.eval().generate(source, num_beams=2, max_new_tokens=12)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    assert torch.equal(model.train().generate(source, num_beams=2, max_new_tokens=12), expected)
