"""minGRU, mLSTM, Mamba-2 and gated DeltaNet in encoder and decoder: contract, equations, chunks, references."""

import pytest
import torch
from compiled_graphs import FEW_LENGTHS
from model_contract import ModelContract

from recnmt_hf import NMTTransformerConfig, NMTTransformerForConditionalGeneration


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
