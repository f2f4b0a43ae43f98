"""Two machines train one model: network namespaces, each with its address, its working folder and its launcher."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml
from other_processes import launched, output_of
from test_sharded_training import assert_same, plan, prepared, weights


__all__ = ["prepared"]  # a fixture
pytestmark = pytest.mark.slow
CPU = "two_hosts.yaml"


def ip(*words):
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def hosts():
    """Names of two namespaces and of their network interfaces, which are joined by a cable."""
    names = [(f"recnmt{os.getpid()}{side}", f"rn{os.getpid()}{side}") for side in "ab"]
    try:
        ip("link", "add", names[0][1], "type", "veth", "peer", "name", names[1][1])
        for number, (host, interface) in enumerate(names, start=1):
            ip("netns", "add", host)
            ip("link", "set", interface, "netns", host)
            ip("-n", host, "addr", "add", f"10.77.0.{number}/24", "dev", interface)
            ip("-n", host, "link", "set", interface, "up")
            ip("-n", host, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces need iproute2 and root ({error})")
    yield names
    for host, _ in names:
        ip("netns", "del", host)


@pytest.fixture
def start(hosts, repository, tmp_path):
    """Return a function that starts a recipe on both hosts, with own words, and code, on the second one."""

    def start(recipe, *words, config=CPU, second=(), common=False, code=None):
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        processes, port = [], 20000 + time.time_ns() // 10**6 % 20000
        for rank, (host, interface) in enumerate(hosts):
            folder = tmp_path / ("common" if common else f"host{rank}")
            folder.mkdir(exist_ok=True)
            command = ["ip", "netns", "exec", host, sys.executable, "-m", "accelerate.commands.launch"]
            command += ["--config_file", repository / "scripts/accelerate" / config, "--mixed_precision", "no"]
            command += ["--num_machines", 2, "--num_processes", 2, "--machine_rank", rank]
            command += ["--main_process_ip", "10.77.0.1", "--main_process_port", port, repository / "scripts/train.py"]
            command += [tmp_path / "recipe.yaml", "--output", "run", *words, *(second if rank == 1 else ())]
            paths = {} if code is None or rank == 0 else {"PYTHONPATH": str(code)}
            processes.append(
                subprocess.Popen(
                    [str(word) for word in command],
                    cwd=folder,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface, **paths},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
            )
        return processes

    return start


def on_one_host(recipe, tmp_path, repository, config):
    """The run of two processes on one machine."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    options = (
        "--config_file",
        repository / "scripts/accelerate" / config,
        "--num_machines",
        "1",
        "--num_processes",
        "2",
    )
    options += ("--mixed_precision", "no")
    words = (tmp_path / "recipe.yaml", "--output", tmp_path / "one")
    output_of(launched(repository / "scripts/train.py", *words, module="accelerate.commands.launch", options=options))
    return tmp_path / "one"


def wait_for(path):
    end = time.time() + 120
    while not path.exists():
        assert time.time() < end, path
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("config", "kind"), [(CPU, "memory"), (CPU, "shards"), (CPU, "common disk"), ("fsdp_8.yaml", "memory")]
)
def test_two_hosts_train_as_one(start, prepared, tmp_path, repository, config, kind):
    """From memory and from shards, with whole and with sharded models, in one folder or in two: the same bits."""
    recipe = plan(prepared if kind == "shards" else None)
    for process in start(recipe, config=config, common=kind == "common disk"):
        output_of(process)
    whole = on_one_host(recipe, tmp_path, repository, config)
    runs = [tmp_path / name / "run" for name in (["common"] if kind == "common disk" else ["host0", "host1"])]
    assert_same(weights(runs[0]), weights(whole))
    assert (runs[0] / "model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()
    for rank, run in enumerate(runs):  # what a host needs to resume
        assert (run / "checkpoint-30/complete.json").exists() and (run / "recipe.yaml").exists()
        assert (run / f"checkpoint-30/rng_state_{rank}.pth").exists()


def test_a_killed_host_ends_the_other_and_the_run_resumes(start, tmp_path, repository):
    recipe = plan(max_steps=200, save_steps=50)
    first, second = start(recipe)
    wait_for(tmp_path / "host1/run/checkpoint-50/complete.json")
    os.killpg(second.pid, signal.SIGKILL)
    output = first.communicate(timeout=120)[0]
    assert first.returncode != 0 and output.count("Another process of the run has ended") == 1, output
    assert "This is a bug" not in output
    for process in start(recipe, "--resume"):
        output_of(process)
    whole = on_one_host(recipe, tmp_path, repository, CPU)
    assert_same(weights(tmp_path / "host0/run", 200), weights(whole, 200))


def test_a_cut_network_recovers(start, hosts, tmp_path, repository):
    """For 20 seconds: TCP sends again."""
    recipe = plan(max_steps=400, save_steps=50)
    processes, (host, interface) = start(recipe), hosts[1]
    wait_for(tmp_path / "host1/run/checkpoint-50/complete.json")
    ip("-n", host, "link", "set", interface, "down")
    time.sleep(20)
    ip("-n", host, "link", "set", interface, "up")
    for process in processes:
        output_of(process)
    assert (tmp_path / "host0/run/model/model.safetensors").exists()


def test_different_recipes_code_and_lost_checkpoints_are_refused(start, repository, tmp_path):
    shutil.copytree(repository / "src", tmp_path / "src")
    with open(tmp_path / "src/recnmt_hf/_version.py", "a") as file:
        file.write("# of another commit\n")
    for process in start(plan(), code=tmp_path / "src"):
        assert "these differ: the code of recnmt_hf" in process.communicate(timeout=120)[0]
    for process in start(plan(), second=["training.learning_rate=0.02"]):
        assert "these differ: training.learning_rate: 0.01 -> 0.02" in process.communicate(timeout=120)[0]
    assert not (tmp_path / "host0/run").exists() and not (tmp_path / "host1/run").exists()
    for process in start(plan(max_steps=5)):
        output_of(process)
    (tmp_path / "host1/run").rename(tmp_path / "lost")
    for process in start(plan(max_steps=10), "--resume"):
        assert "Host 1 lacks checkpoint-5" in process.communicate(timeout=120)[0]
