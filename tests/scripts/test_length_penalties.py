"""Decoding with all length penalties: what is stored of a finished run."""

import gzip
import json

from length_penalties import GRID, choose, main

from recnmt_hf.training.recipe import Recipe
from recnmt_hf.training.run import train


RECIPE = """
model: {type: nmt_transformer, preset: tiny, fields: {d_model: 16, encoder_layers: 1, decoder_layers: 1}}
data: {train: [{generated: train, size: 60}], validation: [{generated: validation, size: 3}]}
tokenizer: {kind: word}
training: {max_steps: 2, max_tokens: 256, eval_steps: 2, save_steps: 2, bleu_samples: 2, use_cpu: true}
average: {count: 1}
decoding: {beams: 2, max_length_extra: 3}
test: {unseen: {generated: test, size: 2}}
"""


def test_a_finished_run_is_decoded_with_all_penalties(tmp_path, capsys):
    (tmp_path / "small.yaml").write_text(RECIPE)
    run, store = tmp_path / "two rows,seed=2", tmp_path / "store"
    train(Recipe.from_file(tmp_path / "small.yaml"), run)
    capsys.readouterr()
    main([str(run), "--store", str(store)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["two_rows-2, validation", "two_rows-2, unseen"]
    folder = store / "two_rows-2"
    result = json.loads((folder / "length_penalties.json").read_text())
    scores = result["sets"]["validation"]["rescored"]
    assert list(scores) == [str(alpha) for alpha in GRID]
    assert scores[str(result["tuned_length_penalty"])]["bleu"] == max(each["bleu"] for each in scores.values())
    assert len((folder / "translations/unseen.tuned.de").read_text().splitlines()) == 2
    kept = [json.loads(line) for line in gzip.decompress((folder / "nbest/unseen.jsonl.gz").read_bytes()).splitlines()]
    texts = [choose(list(map(tuple, hypotheses)), 1.0)[2] for hypotheses in kept]
    assert len(texts) == 2 and all(isinstance(text, str) for text in texts)
