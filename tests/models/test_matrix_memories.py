"""minGRU, mLSTM, Mamba-2 and gated DeltaNet in encoder and decoder: contract, other implementations, chunks."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from compiled_graphs import FEW_LENGTHS
from model_contract import ModelContract
from torch import nn

from recnmt_hf import NMTTransformerConfig, NMTTransformerForConditionalGeneration
from recnmt_hf.models import kernels_linear_attention
from recnmt_hf.models.kernels_linear_attention import (
    MOST_WORDS,
    fold_words,
    linear_attention,
    linear_attention_in_chunks,
    linear_attention_reference,
    read_words,
)
from recnmt_hf.models.matrix_memories import MLSTM, GatedDeltaNet, Mamba2, MinGRU
from recnmt_hf.models.seq2seq_loading import Initialization


KINDS = {"mingru": MinGRU, "mlstm": MLSTM, "mamba2": Mamba2, "gated_delta": GatedDeltaNet}
# Width, heads and words of a single layer.
WIDTH, HEADS, WORDS = 32, 4, 70


def fields(decoder, encoder, **more):
    return {"decoder_autoregression": decoder, "encoder_mixer": encoder, **more}


class TestMatrixMemories(ModelContract):
    config_class = NMTTransformerConfig
    model_class = NMTTransformerForConditionalGeneration
    compiled = {"lengths": FEW_LENGTHS}
    one_layer = {}  # a list of kinds has one for each layer
    variants = {
        "default": fields("gated_delta", "gated_delta"),
        "hybrid": fields(["mamba2", "self_attention"], ["self_attention", "mlstm"], self_attention_type="relative"),
        "mlstm": fields("mlstm", "mingru", normalize_before=True),
        "mamba2": fields("mamba2", "mlstm"),
        "mingru": fields("mingru", "mamba2"),
    }
    # The same for all decoders of this class (test_nmt_transformer.py).
    test_hub_code_loads_without_the_package = test_compiled_by_transformations_of_the_graph = None
    test_learned_prefix = test_a_subclass_is_saved_with_code_that_loads = None
    test_tied_embeddings = test_the_bare_model_resizes = test_learns_short_sequences = None


def inputs(kind, length, dtype, heads=3):
    """Queries, keys, values, decays and rates for two sentences, and a memory."""
    torch.manual_seed(length)
    query, key = torch.randn(2, 2, length, 1 if kind == "shared" else heads, 8, dtype=dtype)
    value, memory = torch.randn(2, length, heads, 16, dtype=dtype), torch.randn(2, heads, 8, 16, dtype=dtype)
    decay, rate = -torch.rand(2, length, heads, dtype=dtype) / 3, torch.rand(2, length, heads, dtype=dtype)
    key = nn.functional.normalize(key, dim=-1)
    tensors = [query, key, value, decay, rate if kind == "delta" else None, memory]
    return [tensor if tensor is None else tensor.requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("kind", ["plain", "shared", "delta"])
@pytest.mark.parametrize("starts_empty", [False, True])
def test_chunks_equal_the_reference(kind, length, dtype, tolerance, starts_empty):
    """Outputs, last memories and gradients."""
    *tensors, memory = inputs(kind, length, dtype)
    expected, memories = linear_attention_reference(*tensors, torch.zeros_like(memory) if starts_empty else memory)
    outputs, last = linear_attention_in_chunks(*tensors, None if starts_empty else memory)
    given = [tensor for tensor in (*tensors, None if starts_empty else memory) if tensor is not None]
    weights = torch.randn_like(outputs), torch.randn_like(last)
    pairs = [(outputs, expected), (last, memories[:, -1])]
    sums = [
        sum((one * weight).sum() for one, weight in zip(side, weights, strict=True))
        for side in zip(*pairs, strict=True)
    ]
    pairs += zip(*(torch.autograd.grad(total, given) for total in sums), strict=True)
    for one, two in pairs:
        assert (one - two).abs().max() <= tolerance * max(1, two.abs().max())


@pytest.mark.parametrize("kind", ["plain", "shared", "delta"])
def test_stored_words_equal_the_reference(kind):
    """Whenever they are written into the memory."""
    *tensors, memory = inputs(kind, 9, torch.float64)
    for start, folds in ((memory, {2, 3, 5}), (memory, {5}), (None, {4, 5})):
        first = torch.zeros_like(memory) if start is None else memory
        expected, memories = linear_attention_reference(*tensors, first)
        words, outputs = {}, []
        for piece in zip(
            *([None] * 9 if tensor is None else tensor.split(2, dim=1) for tensor in tensors), strict=False
        ):
            output, words = read_words(*piece, start, words)
            outputs.append(output)
            if len(outputs) in folds:
                start, words = fold_words(start, **words), {}
        torch.testing.assert_close(torch.cat(outputs, 1), expected, atol=1e-12, rtol=0)
        torch.testing.assert_close(start, memories[:, -1], atol=1e-12, rtol=0)


def test_flash_linear_attention(monkeypatch):
    """On accelerators the package's kernels run where it is installed, with its layout and no scale."""
    calls = []

    def kernel(query, key, value, decay, *rate, scale, initial_state, output_final_state):
        calls.append((query.shape, scale, output_final_state))
        outputs, memory = linear_attention_in_chunks(query, key, value, decay, *(rate or [None]), initial_state)
        return outputs, memory

    monkeypatch.setattr(kernels_linear_attention, "flash_linear_attention", lambda has_rate: kernel)
    monkeypatch.setattr(kernels_linear_attention, "on_cpu", lambda tensor: False)
    for kind in ("shared", "delta"):
        tensors = inputs(kind, 9, torch.float32)
        expected, memories = linear_attention_reference(*tensors)
        for one, two in zip(linear_attention(*tensors), (expected, memories[:, -1]), strict=True):
            torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
    assert calls == [((2, 9, 3, 8), 1.0, True)] * 2


@pytest.fixture
def layer(request):
    """A layer of a decoder with random parameters, and words."""
    config = NMTTransformerConfig(d_model=WIDTH, decoder_attention_heads=HEADS, encoder_attention_heads=HEADS)
    torch.manual_seed(3)
    layer = KINDS[request.param](config, 0).double()
    layer.apply(lambda part: part.initialize(Initialization(WIDTH)) if hasattr(part, "initialize") else None)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return layer, torch.randn(3, WORDS, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize("layer", ["mingru"], indirect=True)
def test_equations_of_mingru(layer):
    layer, words = layer
    (of_gate, of_candidate), (gate_bias, candidate_bias) = layer.in_proj.weight.chunk(2), layer.bias.chunk(2)
    state, outputs = torch.zeros(3, of_gate.shape[0], dtype=torch.float64), []
    for word in words.unbind(1):
        gate = torch.sigmoid(word @ of_gate.T + gate_bias)
        state = (1 - gate) * state + gate * (word @ of_candidate.T + candidate_bias)
        outputs.append(layer.out_proj(state))
    torch.testing.assert_close(layer(words)[0], torch.stack(outputs, 1), atol=1e-10, rtol=0)


@pytest.mark.parametrize("layer", ["mlstm"], indirect=True)
def test_xlstm_of_transformers(layer):
    layer, words = layer
    module = pytest.importorskip("transformers.models.xlstm.modeling_xlstm")
    if not hasattr(module, "xLSTMLayer"):
        pytest.skip("the package xlstm replaces the layer of transformers")
    sizes = {
        "hidden_size": WIDTH,
        "num_heads": HEADS,
        "qk_dim_factor": 0.5,
        "v_dim_factor": 1.0,
        "num_hidden_layers": 1,
    }
    options = {"weight_mode": "fused", "gate_soft_cap": 1e6, "norm_eps": 1e-6, "eps": 0.0, "use_bias": False}
    options |= {"norm_reduction_force_float32": False, "autocast_kernel_dtype": "float32"}
    other = module.xLSTMLayer(transformers.xLSTMConfig(**sizes, **options)).eval()
    layer, words = layer.float(), words.float()
    with torch.no_grad():
        *maps, write, forget = layer.in_proj.weight.split(list(layer.sizes.values()))
        other.qkv_opreact.weight.copy_(torch.cat(maps))
        other.ifgate_preact.weight.copy_(torch.cat([write, forget]))
        other.ifgate_preact.bias.copy_(torch.cat([layer.write_bias, layer.forget_bias]))
        other.multihead_norm.weight.copy_(layer.norm)
        other.out_proj.weight.copy_(layer.out_proj.weight)
        expected = other(words)[0] + layer.out_proj.bias
    torch.testing.assert_close(layer(words)[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layer", ["mamba2"], indirect=True)
def test_mamba2_of_transformers(layer):
    layer, words = layer
    module = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    inner, state = layer.convolved[:2]
    sizes = {"num_heads": HEADS, "head_dim": inner // HEADS, "state_size": state, "hidden_size": inner, "expand": 1}
    config = transformers.Mamba2Config(
        **sizes, n_groups=1, use_bias=False, layer_norm_epsilon=1e-6, num_hidden_layers=1
    )
    values = {**config.to_dict(), "layer_types": config.layer_types, "hidden_size": WIDTH, "expand": inner / WIDTH}
    config = SimpleNamespace(**values)  # its own class demands an integer
    other = module.Mamba2Mixer(config, 0).double().eval()
    with torch.no_grad():
        other.in_proj.weight.copy_(layer.in_proj.weight)
        other.conv1d.weight.copy_(layer.conv.weight[:, None])
        other.conv1d.bias.copy_(layer.conv.bias)
        for name, parameter in (("dt_bias", layer.steps.bias), ("A_log", layer.steps.rate_log), ("D", layer.skip)):
            getattr(other, name).copy_(parameter)
        other.norm.weight.copy_(layer.norm)
        other.out_proj.weight.copy_(layer.out_proj.weight)
        expected = other(words) + layer.out_proj.bias
    torch.testing.assert_close(layer(words)[0], expected, atol=1e-5, rtol=1e-5)  # sums are in float32 there


@pytest.mark.parametrize("layer", ["gated_delta"], indirect=True)
def test_gated_delta_net_of_transformers(layer):
    layer, words = layer
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    key, value = WIDTH // HEADS // 2, WIDTH // HEADS
    sizes = {"linear_num_key_heads": HEADS, "linear_num_value_heads": HEADS, "linear_key_head_dim": key}
    sizes |= {"linear_value_head_dim": value, "hidden_size": WIDTH, "num_hidden_layers": 1, "rms_norm_eps": 1e-6}
    other = module.Qwen3NextGatedDeltaNet(transformers.Qwen3NextConfig(**sizes), 0).double().eval()
    with torch.no_grad():
        maps = layer.in_proj.weight.split([*layer.convolved, WIDTH, HEADS, HEADS])
        *maps, step, rate = (part.unflatten(0, (HEADS, -1)) for part in maps)
        other.in_proj_qkvz.weight.copy_(torch.cat(maps, dim=1).flatten(0, 1))
        other.in_proj_ba.weight.copy_(torch.cat([rate, step], dim=1).flatten(0, 1))
        other.conv1d.weight.copy_(layer.conv.weight[:, None])
        for name, parameter in (("dt_bias", layer.steps.bias), ("A_log", layer.steps.rate_log)):
            getattr(other, name).copy_(parameter)
        other.norm.weight.copy_(layer.norm)
        other.out_proj.weight.copy_(layer.out_proj.weight)
        expected = other(words) + layer.out_proj.bias
    torch.testing.assert_close(layer(words)[0], expected, atol=1e-5, rtol=1e-5)  # sums are in float32 there


@pytest.fixture
def new_cache():
    config = NMTTransformerConfig(d_model=WIDTH, decoder_autoregression="mlstm", decoder_layers=1)
    return lambda: transformers.DynamicCache(config=config.get_text_config(decoder=True))


@pytest.mark.parametrize("layer", KINDS, indirect=True)
def test_states_of_a_decoder_do_not_grow(layer, new_cache):
    layer, words = layer
    cache = new_cache()
    with torch.no_grad():
        steps = [layer(words[:, t : t + 1], cache=cache)[0] for t in range(WORDS)]
        sizes = {name: state.untyped_storage().nbytes() for name, state in cache.layers[0].states.items()}
        layer(words[:, :1], cache=cache)
    torch.testing.assert_close(torch.cat(steps, 1), layer(words)[0], atol=1e-10, rtol=0)
    assert sizes == {name: state.untyped_storage().nbytes() for name, state in cache.layers[0].states.items()}
    assert all(part.shape[2] <= MOST_WORDS + 1 for part in cache.layers[0].words.values())


@pytest.mark.parametrize("layer", KINDS, indirect=True)
def test_a_cache_continues_in_pieces_taken_back_and_joined(layer, new_cache):
    """Each piece has a word, several, or some that are undone; rows of another cache have other pieces."""
    layer, words = layer
    expected, caches = layer(words)[0], []
    for pieces in ([1, 1, 4, 1, 33, 1, 1], [40, 1, 1]):
        cache, seen = new_cache(), 0
        for count in pieces:
            found = layer(words[:, seen : seen + count], cache=cache)[0]
            torch.testing.assert_close(found, expected[:, seen : seen + count], atol=1e-10, rtol=0)
            seen += count
        caches.append(cache)
    joined, other = caches[0].layers[0], caches[1].layers[0]
    joined.concat(other)
    rows = torch.tensor([5, 0, 3])
    joined.reorder_cache(rows)
    for more in (42, 43):
        found = layer(words[rows % 3, more : more + 1], cache=caches[0])[0]
        torch.testing.assert_close(found, expected[rows % 3, more : more + 1], atol=1e-10, rtol=0)
    other.activate_past_recording()
    for count, undone in ((5, 3), (1, 0), (4, 1), (2, 2)):
        seen = other.get_seq_length()
        found = layer(words[:, seen : seen + count], cache=caches[1])[0]
        torch.testing.assert_close(found, expected[:, seen : seen + count], atol=1e-10, rtol=0)
        other.crop(-undone)


@pytest.mark.parametrize("layer", KINDS, indirect=True)
def test_words_are_taken_back_from_a_piece_with_padding(layer, new_cache):
    layer, words = layer
    mask, cache = torch.ones(3, 9, dtype=torch.long), new_cache()
    mask[0, :3] = mask[1, 2] = mask[2, 1:7:2] = 0
    cache.layers[0].activate_past_recording()
    layer(words[:, :8], mask[:, :8], cache)
    cache.crop(-3)
    found = layer(words[:, 5:9], mask[:, 5:], cache)[0]
    for row, real in enumerate(mask.bool()):
        expected = layer(words[row : row + 1, :9][:, real])[0][0, -int(real[5:].sum()) :]
        torch.testing.assert_close(found[row, real[5:]], expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("preset", ["tiny", "small", "base"])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_of_self_attention(kind, preset):
    counts = []
    for name in ("self_attention", kind):
        config = NMTTransformerConfig.from_preset(preset, **fields(name, name))
        with torch.device("meta"):
            counts.append(NMTTransformerForConditionalGeneration(config).num_parameters())
    assert counts[1] == pytest.approx(counts[0], rel=0.03)
