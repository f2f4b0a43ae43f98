"""Large corpora: OpusFilter's example of the page, and datatrove's executors (Slurm: with a stand-in)."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


SCRIPT = Path(__file__).parents[2] / "scripts/examples/prepare_on_cluster.py"
# Runs the tasks of the script as processes, one after another; the job that merges statistics waits for nothing.
SBATCH = """#!/bin/sh
for last; do :; done
end=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$last")
for task in $(seq 0 "$end"); do
    SLURM_ARRAY_TASK_ID=$task SLURM_NODELIST=here RUN_OFFSET=0 sh "$last" >&2 || exit 1
done
echo Submitted batch job 7
"""
OPTIONS = {"local": ["workers=2"], "ray": ["cpus_per_task=1"], "slurm": ["partition=cpu", "time=01:00:00"]}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    data = {"source_lang": "en", "target_lang": "de", "validation": {"generated": "validation"}, "shard_size": 100}
    content = {"data": {**data, "train": {"generated": "train", "size": 1000}}, "model": {"type": "nmt_transformer"}}
    (folder / "recipe.yaml").write_text(json.dumps(content))
    command = ["recnmt", "prepare", str(folder / "recipe.yaml"), "--output", str(folder / "one"), "--workers", "1"]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "recipe.yaml"


@pytest.mark.slow
@pytest.mark.parametrize("engine", OPTIONS)
def test_same_bytes(recipe, tmp_path, engine):
    pytest.importorskip("datatrove", reason="datatrove is not installed")
    pytest.importorskip("ray", reason="ray is not installed")
    tools = tmp_path / "bin"
    tools.mkdir()
    own = {"sbatch": SBATCH, "srun": '#!/bin/sh\nshift 3\n"$@"\n', "scontrol": "#!/bin/sh\necho here\n"}
    for name, content in own.items():
        (tools / name).write_text(content)
        (tools / name).chmod(0o755)
    python = Path(sys.executable).parent  # of datatrove's own commands
    environment = {**os.environ, "PATH": f"{tools}:{python}:{os.environ['PATH']}", "RAY_USAGE_STATS_ENABLED": "0"}
    output = tmp_path / "prepared"
    command = [sys.executable, str(SCRIPT), str(recipe), "--output", str(output), "--executor", engine, "--tasks", "3"]
    command += [f"--option={option}" for option in OPTIONS[engine]]
    for _ in range(2):  # the second time nothing is left to do
        subprocess.run(command, check=True, env=environment, timeout=300)
    contents = [
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (output, recipe.parent / "one")
    ]
    assert contents[0] == contents[1]


@pytest.mark.slow
def test_filters(repository, tmp_path):
    """Repeated pairs and exchanged sides go."""
    pytest.importorskip("opusfilter", reason="opusfilter is not installed")
    page = (repository / "src/recnmt_hf/data/README.md").read_text()
    example = next(text for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "remove_duplicates" in text)
    (tmp_path / "filter.yaml").write_text(example)
    pairs = [("The old house stands behind the mill.", "Das alte Haus steht hinter der Mühle.")]
    pairs += [("Nobody has seen the children.", "Niemand hat die Kinder gesehen.")]
    for number, language in enumerate(("en", "de")):
        texts = [pair[number] for pair in pairs] + [pairs[0][number], pairs[1][1 - number], ""]
        (tmp_path / f"corpus.{language}").write_text("\n".join(texts) + "\n")
    command = [str(Path(sys.executable).parent / "opusfilter"), "filter.yaml"]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    for number, language in enumerate(("en", "de")):
        kept = (tmp_path / "clean" / f"train.{language}").read_text().splitlines()
        assert kept == [pair[number] for pair in pairs]
