"""Examples that need packages of their own, here with stand-ins for them."""

import json
import os
import subprocess
import sys


MBRS = """
class Metric:
    Config = dict
    def __init__(self, config):
        pass

def get_metric(name):
    assert name == "chrf"
    return Metric
"""
DECODERS = """
from types import SimpleNamespace

class DecoderMBR:
    Config = dict
    def __init__(self, config, metric):
        pass
    def decode(self, hypotheses, references, source, nbest):
        assert hypotheses == references and source.startswith("source") and nbest == 1
        return SimpleNamespace(sentence=[max(hypotheses, key=hypotheses.count)])
"""


def test_minimum_bayes_risk(repository, tmp_path):
    """Each sentence has one result, chosen among its own hypotheses."""
    package = tmp_path / "packages/mbrs"
    package.mkdir(parents=True)
    for name, content in (("__init__", ""), ("metrics", MBRS), ("decoders", DECODERS)):
        (package / f"{name}.py").write_text(content)
    texts = [["a", "b", "b"], ["b", "c", "c"], ["d"]]
    records = [{"line": n, "source": f"source {n}", "text": text} for n, own in enumerate(texts) for text in own]
    (tmp_path / "samples.jsonl").write_text("\n".join(map(json.dumps, records)))
    result = subprocess.run(
        [sys.executable, repository / "scripts/examples/minimum_bayes_risk.py", tmp_path / "samples.jsonl"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "packages")},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["b", "c", "d"]
