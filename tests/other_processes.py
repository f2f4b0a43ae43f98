"""Code that runs in a process of its own, one for many questions: importing torch takes longest."""

import contextlib
import json
import os
import subprocess
import sys
import textwrap


# Runs what it is sent, and answers each with a line of JSON: what `found` holds then, or the error.
OTHER = """
    import contextlib, json, os, sys, traceback

    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "recnmt_hf":
                raise ImportError("recnmt_hf is not installed here")

    if sys.argv[1] == "stranger":
        sys.meta_path.insert(0, Absent())
    for line in sys.stdin:
        folder, code = json.loads(line)
        os.chdir(folder)
        own = {}
        try:
            with contextlib.redirect_stdout(sys.stderr):
                exec(code, own)
            if sys.argv[1] == "stranger":
                assert not any(name.split(".")[0] == "recnmt_hf" for name in sys.modules)
            answer = {"found": own["found"]}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)
"""


@contextlib.contextmanager
def other_process(kind, home, **environment):
    """
    A function that runs code in a folder, in one process of its own, and returns what the code left in `found`. A
    stranger cannot import recnmt_hf.
    """
    settings = {"HF_HOME": str(home), "OMP_NUM_THREADS": "1", **({"PYTHONPATH": ""} if kind == "stranger" else {})}
    with (
        open(home / f"{kind}.txt", "w") as errors,
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(OTHER), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **settings, **environment},
        ) as process,
    ):

        def run(code, folder):
            process.stdin.write(json.dumps([str(folder), textwrap.dedent(code)]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, (home / f"{kind}.txt").read_text()[-3000:]
            answer = json.loads(line)
            assert "error" not in answer, answer["error"]
            return answer["found"]

        yield run
        process.stdin.close()


def launched(program, *words, module="torch.distributed.run", options=("--nproc_per_node", "2"), **environment):
    """Start a program in two processes by a launcher, torchrun or `accelerate launch`."""
    port = "--master_port" if module == "torch.distributed.run" else "--main_process_port"
    command = [sys.executable, "-m", module, *options, port, str(20000 + os.getpid() % 20000), program, *words]
    return subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        start_new_session=True,
    )


def output_of(process):
    """Wait for a launched process, and return its output."""
    output = process.communicate(timeout=400)[0]
    assert process.returncode == 0, output[-3000:]
    return output
