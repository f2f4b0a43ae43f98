"""Decoding with all length penalties: what is stored of a finished run."""

import gzip
import json

from length_penalties import GRID, choose, main
from test_sweep import RECIPE

from recnmt_hf.training.recipe import Recipe
from recnmt_hf.training.run import train


def test_a_finished_run_is_decoded_with_all_penalties(tmp_path, capsys):
    (tmp_path / "small.yaml").write_text(RECIPE + "decoding: {beams: 2, max_length_extra: 3}\n")
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
    assert len((folder / "translations/unseen.tuned.de").read_text().splitlines()) == 4
    kept = [json.loads(line) for line in gzip.decompress((folder / "nbest/unseen.jsonl.gz").read_bytes()).splitlines()]
    texts = [choose(list(map(tuple, hypotheses)), 1.0)[2] for hypotheses in kept]
    assert len(texts) == 4 and all(isinstance(text, str) for text in texts)
