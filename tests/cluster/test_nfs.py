"""The user's steps on a real NFSv4.2: two machines with kernels of their own, run after run on one file."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest
from cluster import nfs_lab
from cluster.training import BASE, alone, learned, parts, rows_of_a_log
from helpers.runs import ROOT, merged
from torch.testing import assert_close

JOB = """
set -e
mkdir -p /run/job /run/results
busybox mount -t hostfs none /run/results -o {results}
cp {results}/train_$NODE.jsonl /run/job/train.jsonl
cp {results}/x.json /run/job/x.json
busybox mount | busybox grep ' on /mnt/share type nfs4 (rw,relatime,vers=4.2,'
[ "$NODE" = 1 ] || {first}
export PYTHONPATH={root} OMP_NUM_THREADS=1
cd /run/job
for run in $(busybox seq {runs}); do
  before=$(busybox date +%s)
  {python} -m workflows.dqn --config /run/job/x.json --node_index=$NODE > out.json 2> log || {{ cat log; exit 1; }}
  grep 'machines met' log
  echo "run $run: $(( $(busybox date +%s) - before )) s, files left on the share: $(busybox ls -A $SHARED)"
  [ "$NODE" = 1 ] || busybox sha256sum out/checkpoints/step_*/learner.safetensors
done
[ "$NODE" = 1 ] || cp -r out /run/results/out
"""


def steps(tmp_path: Path, runs: int, seconds: float, first: str) -> list[float]:
    """Runs the job on both machines; returns how long node 0 waited until both had met, run by run.

    Args:
        tmp_path: for the data and what comes back.
        runs: how many, one after the other.
        seconds: for all.
        first: what node 0's shell does before its first run.
    """
    lines = rows_of_a_log(tmp_path, 400)
    whole = {"data": {"global_minibatch_size": len(lines)}, "epochs": 10}
    for node, part in enumerate(parts(lines, 2)):
        (tmp_path / f"train_{node}.jsonl").write_text("".join(part))
    (tmp_path / "x.json").write_text(json.dumps(merged(BASE, {
        "training_data_path": "/run/job/train.jsonl", "model_output_path": "/run/job/out", "num_nodes": 2,
        "init_method": "file:///mnt/share/run.rdzv", **whole,
    })))  # fmt: skip
    said, _ = nfs_lab.run_on_two_machines(
        JOB.format(results=tmp_path, root=ROOT, runs=runs, first=first, python=sys.executable), seconds, memory="2500M"
    )
    hashes = [line.split()[0] for line in said.splitlines() if "learner.safetensors" in line]
    assert (len(hashes), len(set(hashes))) == (runs, 1)
    assert_close(learned(tmp_path / "out"), alone(tmp_path / "alone", lines, **whole), rtol=1e-5, atol=1e-5)
    return [float(wait) for wait in re.findall(r"met after ([0-9.]+) s", said)]


@pytest.mark.nfs
@pytest.mark.usefixtures("need_nfs")
@pytest.mark.timeout(500)
def test_the_seven_steps_on_nfs(tmp_path: Path) -> None:
    """Node 0 comes 15 s after node 1, which has looked for the file in vain: a failed look-up can hide it for 30 s."""
    (waited,) = steps(tmp_path, 1, 300, "sleep 15")
    assert waited < 10


@pytest.mark.nfs
@pytest.mark.slow
@pytest.mark.usefixtures("need_nfs")
@pytest.mark.timeout(7200)
def test_50_runs_in_a_row_on_nfs(tmp_path: Path) -> None:
    """An empty file to begin with, as users make one."""
    assert len(steps(tmp_path, 50, 6000, ": > $SHARED/run.rdzv")) == 50


REPLACED = """
import sys, time
from pathlib import Path
from reagent_lite.distributed.meeting_file import MeetingFile, Record
node, file = int(sys.argv[1]), MeetingFile(Path(sys.argv[2]))
def record(port):
    return Record(nonce="n", run="r", attempt=0, address="10.98.0.1", interface="vec0", port=port, num_nodes=2,
                  host="h", pid=1, started="then", others=("x" * 3000,))
if node == 0:
    for port in range(1, 120):
        file.publish(record(port))
    file.publish(record(9999))
    while not Path(sys.argv[2] + ".seen").exists():
        time.sleep(0.1)
else:
    seen, odd = set(), set()
    while 9999 not in seen:
        found = file.read()
        seen.add(found.port) if isinstance(found, Record) else odd.add(found)
    print(len(seen), sorted(odd))
    Path(sys.argv[2] + ".seen").touch()
"""


@pytest.mark.slow
@pytest.mark.nfs
@pytest.mark.usefixtures("need_nfs")
def test_a_file_that_is_replaced_on_the_server_is_never_read_in_part(tmp_path: Path) -> None:
    """What a client meets then, ESTALE among it, is a reason to look again."""
    (tmp_path / "replaced.py").write_text(REPLACED)
    seen, _, odd = nfs_lab.run_on_two_machines(
        f"PYTHONPATH={ROOT} {sys.executable} {tmp_path}/replaced.py $NODE $SHARED/run.rdzv", 120
    )[1].partition(" ")
    assert int(seen) >= 1  # how often depends on how fast the two machines are
    assert set(ast.literal_eval(odd)) <= {"no file", "Stale file handle", "No such file or directory"}


HELD = """
import logging, os, signal, subprocess, sys, time
from pathlib import Path
from reagent_lite import folder_lock
from reagent_lite.errors import ConfigError
role, folder = sys.argv[1], Path(sys.argv[2])
logging.basicConfig(level=logging.INFO, format="%(message)s")
def until(name):
    while name not in os.listdir(folder):
        time.sleep(0.1)
if role == "hold":
    with folder_lock.alone_in(folder, "model_output_path"):
        (folder / "held").touch()
        time.sleep(600)
elif role == "0":
    holder = subprocess.Popen([sys.executable, __file__, "hold", str(folder)])
    until("tried")
    holder.kill()
    holder.wait()
    (folder / "killed").touch()
else:
    until("held")
    folder_lock._LEASE_SECONDS = 2.0
    try:
        with folder_lock.alone_in(folder, "model_output_path"):
            print("two have it")
    except ConfigError as error:
        print(error)
    (folder / "tried").touch()
    until("killed")
    with folder_lock.alone_in(folder, "model_output_path"):
        print("has it")
"""


@pytest.mark.nfs
@pytest.mark.usefixtures("need_nfs")
def test_a_folder_on_nfs_is_one_run_s_at_a_time(tmp_path: Path) -> None:
    """Until that run is killed: the server then has its lock back at once."""
    (tmp_path / "held.py").write_text(HELD)
    first, second, *others = nfs_lab.run_on_two_machines(
        f"PYTHONPATH={ROOT} {sys.executable} {tmp_path}/held.py $NODE $SHARED", 60
    )[1].splitlines()
    holder = r"in use by the run of host node0, pid \d+, since \S+"
    assert re.search(holder + r"; waiting 2 s in case it has died$", first)
    assert re.search(holder + r"\. Wait for that run, or end it; or name another folder$", second)
    assert others == ["has it"]
