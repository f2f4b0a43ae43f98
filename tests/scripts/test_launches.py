"""What a GPU has to launch, by `scripts/benchmarks/launches.py`."""

import pytest


pytest.importorskip("triton", reason="Triton is not installed")
from launches import count_decoding, count_training
from named_models import build_model, parse_model


# Sizes that do not change the counts.
SMALL = {"d_model": 64, "share_encoder_decoder_embeddings": True, "tie_word_embeddings": True}
# Most launches of a training step and of a decoding step, as a share of MarianMT's.
MOST = {
    "nmt_transformer": (1.0, 1.0),
    "nmt_transformer:decoder_autoregression=ssru": (1.2, 1.0),
    "onlstm_transformer": (1.6, 1.0),
    "rnmt:relation_layers=0": (1.0, 0.5),
    "rnmt": (1.4, 0.5),
    "vrnmt": (1.7, 0.5),
    "gcn_rnmt": (1.4, 0.5),
    "biarn_transformer": (1.8, 1.0),
    "rpe_transformer": (1.8, 1.0),
    "gret": (1.8, 1.0),
}
# Most launches of a further word, forward and backward, and the recurrent layers that it passes one word at a time.
GROWTH = {"onlstm_transformer": (5, 3), "rnmt:relation_layers=0": (16, 1), "gcn_rnmt": (16, 1)}


def model_of(text):
    name, fields = parse_model(text)
    return build_model(name, "base", 100, {**({} if name == "marian" else SMALL), **fields})


@pytest.fixture(scope="module")
def marian():
    model = model_of("marian")
    forward, backward, _ = count_training(model, 2, 27)
    return forward.total() + backward.total(), count_decoding(model, 2, 27, 4)


@pytest.mark.parametrize("text", MOST)
def test_shares_of_marian(text, marian):
    model = model_of(text)
    forward, backward, _ = count_training(model, 2, 27)
    assert (forward.total() + backward.total()) / marian[0] <= MOST[text][0]
    assert count_decoding(model, 2, 27, 4) / marian[1] <= MOST[text][1]


@pytest.mark.parametrize("text", GROWTH)
def test_growth_with_length_and_no_waiting(text):
    """The host waits for no step: however long the sentences are, it waits as often."""
    model, (most, layers) = model_of(text), GROWTH[text]
    counts = [count_training(model, 2, length) for length in (9, 27)]
    totals = [forward.total() + backward.total() for forward, backward, _ in counts]
    assert (totals[1] - totals[0]) / 18 <= most * layers
    assert counts[0][2] == counts[1][2]
