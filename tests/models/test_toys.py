"""
The ground of every model, shown by three that have nothing but a mechanism each: a recurrent decoder with a second
memory, an encoder with a gated vector for each source, and a Transformer decoder with a recurrent input. They go
through the whole contract, and a new model is written as they are.
"""

import torch
from model_contract import ModelContract, ragged_batch
from toy_zoo import zoo

from recnmt_hf.models.seq2seq_outputs import CACHE


class TestGRUToy(ModelContract):
    config_class, model_class = zoo("gru_toy", "GRUToy")

    def config(self, **fields):
        return super().config(**{"decoder_layers": 1, **fields})

    def test_a_reset_cache_starts_afresh(self):
        model = self.model()
        first, second = torch.randint(4, 30, (2, 6)), torch.randint(4, 30, (2, 4))
        start = torch.ones(2, 1, dtype=torch.long)
        cache = model(first, decoder_input_ids=start, use_cache=True)[CACHE]
        cache.reset()
        assert cache.get_seq_length() == 0
        found = model(second, decoder_input_ids=start, cache=cache, use_cache=True).logits
        torch.testing.assert_close(found, model(second, decoder_input_ids=start).logits, atol=1e-10, rtol=0)


class TestGateToy(ModelContract):
    config_class, model_class = zoo("gate_toy", "GateToy")
    test_compiled_graphs_serve_all_lengths = test_an_exported_graph_is_free_of_batch_and_lengths = (
        None  # as the first toy
    )
    test_compiled_by_transformations_of_the_graph = test_learns_short_sequences = None

    def test_the_vector_is_projected_once_per_source(self, variant):
        model = self.model(variant)
        seen = []
        model.model.decoder.of_source.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
        model.generate(torch.randint(4, 30, (2, 6)), num_beams=5, max_new_tokens=6, min_new_tokens=6)
        assert seen == [2]

    def test_extra_outputs_reach_both_outputs_by_name(self, variant):
        model = self.model(variant)
        inputs = {"input_ids": torch.randint(4, 30, (2, 6)), "decoder_input_ids": torch.randint(4, 30, (2, 5))}
        whole, bare = (each(**inputs, output_attentions=True) for each in (model, model.model))
        assert torch.equal(whole.global_hidden_state, bare.global_hidden_state)
        assert torch.equal(whole.gates[0], bare.gates[0]) and whole.gates[0].shape == (2, 5, 32)
        assert model(**inputs).gates is None
        torch.testing.assert_close(model.lm_head(bare.last_hidden_state), whole.logits)
        assert {"global_hidden_state", "gates"} <= set(model.config.keys_to_ignore_at_inference)

    def test_an_auxiliary_loss_is_added_and_accumulates(self, variant):
        batch = ragged_batch()
        plain, added = self.model(variant), self.model({**variant, "auxiliary_weight": 0.3})
        loss = added(**batch)
        assert loss.auxiliary_loss > 0 and plain(**batch).auxiliary_loss is None
        torch.testing.assert_close(loss.loss, plain(**batch).loss + loss.auxiliary_loss)
        torch.testing.assert_close(added(**batch, return_logits=False).loss, loss.loss)
        count = (batch["labels"] != -100).sum()
        rows = [{name: tensor[i : i + 1] for name, tensor in batch.items()} for i in range(3)]
        torch.testing.assert_close(sum(added(**row, num_items_in_batch=count).loss for row in rows), loss.loss)


class TestInputToy(ModelContract):
    config_class, model_class = zoo("input_toy", "InputToy")
    variants = {"default": {}, "lstm": {"cell": "lstm"}}
    test_compiled_graphs_serve_all_lengths = test_an_exported_graph_is_free_of_batch_and_lengths = (
        None  # as the first toy
    )
    test_compiled_by_transformations_of_the_graph = test_learns_short_sequences = None
