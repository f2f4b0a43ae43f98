"""Minimum Bayes risk decoding, with a stand-in for the package mbrs."""

import importlib
import json
import sys
from types import SimpleNamespace


class Metric:
    Config = dict

    def __init__(self, config):
        pass


class Decoder:
    Config = dict

    def __init__(self, config, metric):
        assert isinstance(metric, Metric)

    def decode(self, hypotheses, references, source, nbest):
        assert hypotheses == references and source.startswith("source") and nbest == 1
        return SimpleNamespace(sentence=[max(hypotheses, key=hypotheses.count)])


def test_each_sentence_has_one_of_its_own_hypotheses(tmp_path, monkeypatch, capsys):
    parts = {"decoders": {"DecoderMBR": Decoder}, "metrics": {"get_metric": {"chrf": Metric}.get}}
    for name, content in ({"mbrs": {}} | {f"mbrs.{part}": content for part, content in parts.items()}).items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))
    texts = [["a", "b", "b"], ["b", "c", "c"], ["d"]]
    records = [{"line": n, "source": f"source {n}", "text": text} for n, own in enumerate(texts) for text in own]
    (tmp_path / "samples.jsonl").write_text("\n".join(map(json.dumps, records)))
    monkeypatch.setattr("sys.argv", ["minimum_bayes_risk.py", str(tmp_path / "samples.jsonl")])
    importlib.import_module("minimum_bayes_risk").main()
    assert capsys.readouterr().out.split() == ["b", "c", "d"]
