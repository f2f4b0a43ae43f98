"""Multi-head attention by itself: heads, beams, caches, and when weights are returned."""

import pytest
import torch
from model_contract import TINY, ragged_batch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import recnmt_hf
from recnmt_hf import NMTTransformerConfig
from recnmt_hf.models.attention import MultiHeadAttention, masked_softmax
from recnmt_hf.models.decoder_cache import SourceMemoryCache


def config(implementation="sdpa"):
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    made = NMTTransformerConfig(vocab_size=10, d_model=6, decoder_layers=1, **heads)
    made._attn_implementation = implementation
    return made


def attention(*args, implementation="sdpa", **settings):
    torch.manual_seed(3)
    return MultiHeadAttention(config(implementation), 6, 2, *args, **settings).double().eval()


def by_hand(layer, queries, memory, visible=None):
    """One sentence, head by head."""
    contexts, all_weights = [], []
    for head in range(2):
        part = slice(3 * head, 3 * head + 3)
        query, key, value = (
            states @ linear.weight[part].T + linear.bias[part]
            for states, linear in ((queries, layer.q_proj), (memory, layer.k_proj), (memory, layer.v_proj))
        )
        scores = query @ key.T / 3**0.5
        weights = (scores if visible is None else scores.masked_fill(~visible, -torch.inf)).softmax(-1)
        contexts.append(weights @ value)
        all_weights.append(weights)
    return layer.out_proj(torch.cat(contexts, -1)), torch.stack(all_weights)


def test_weights_of_a_query_that_sees_nothing_are_zero():
    scores = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    visible = torch.tensor([[True, True, False], [False] * 3])
    weights = masked_softmax(scores, visible, torch.float64)
    assert weights.dtype == torch.float64 and (weights[1] == 0).all() and weights[0, 2] == 0
    torch.testing.assert_close(weights[0, :2].float(), scores[0, :2].softmax(0))
    many = torch.randn(3000).bfloat16()
    for kind in (torch.bfloat16, torch.float16):
        half = masked_softmax(many.to(kind), None, kind)
        assert half.dtype == kind and torch.equal(half, many.to(kind).float().softmax(0).to(kind))
    exact = torch.randn(5, dtype=torch.float64)
    assert torch.equal(masked_softmax(exact, None, torch.float64), exact.softmax(0))


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flex_attention"])
@pytest.mark.parametrize("sources", [1, 3])
def test_beams_attend_the_memory_of_their_source(sources, implementation):
    """Two rows for each source, queries of another width; projected once; weights on request."""
    layer = attention(query_dim=4, memory="encoder", layer_idx=0, implementation=implementation)
    queries, memory = (torch.randn(n, 2, d, dtype=torch.float64) for n, d in ((2 * sources, 4), (sources, 6)))
    visible = torch.tensor([[True, False], [True, True], [True, True]])[:sources]
    mask = visible[:, None, None]
    cache = EncoderDecoderCache(DynamicCache(), SourceMemoryCache(1))
    weights_asked = {"output_attentions": implementation == "sdpa"}
    found, weights = layer(queries, memory, mask, cache, **weights_asked)
    expected = [by_hand(layer, queries[i], memory[i // 2], visible[i // 2]) for i in range(2 * sources)]
    torch.testing.assert_close(found, torch.stack([output for output, _ in expected]))
    kept = cache.cross_attention_cache
    assert list(kept.layers[0].memories) == ["encoder"] and kept.beams == 2
    torch.testing.assert_close(layer(queries, None, mask, cache)[0], found)
    if implementation == "flex_attention":
        assert weights is None
        return
    torch.testing.assert_close(weights, torch.stack([each for _, each in expected]))
    without = layer(queries, memory, mask)
    torch.testing.assert_close(without[0], found)
    assert (without[1] is None) == (implementation == "sdpa")
    layer.config._attn_implementation = "eager"
    layer.config.output_attentions = True
    layer.config._attn_implementation = implementation
    torch.testing.assert_close(layer(queries, memory, mask)[1], weights)


@pytest.mark.parametrize("family", ["NMTTransformer", "BiARNTransformer", "GRET"])
def test_arguments_of_a_users_own_kernel_reach_every_attention(family, monkeypatch):
    calls = []

    def kernel(module, query, key, value, attention_mask, *, own_argument, **kwargs):
        calls.append((type(module).__name__, own_argument))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "own", kernel)
    AttentionMaskInterface.register("own", sdpa_mask)
    model = getattr(recnmt_hf, f"{family}ForConditionalGeneration")(getattr(recnmt_hf, f"{family}Config")(**TINY))
    batch = ragged_batch()
    expected = model.eval()(**batch).logits
    model.set_attn_implementation("own")
    torch.testing.assert_close(model(**batch, own_argument=7).logits, expected, atol=1e-5, rtol=1e-5)
    assert [argument for _, argument in calls] == [7] * (7 if family == "BiARNTransformer" else 6)
