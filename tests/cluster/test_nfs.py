"""The user's steps on a real NFSv4.2: two machines with kernels of their own, run after run on one file."""

import json
import sys
from pathlib import Path

import pytest
from cluster import nfs_lab
from cluster.training import BASE, ROOT, alone, learned, merged, parts, rows_of_a_log, same

JOB = """
set -e
mkdir -p /run/job /run/results
busybox mount -t hostfs none /run/results -o {results}
cp {results}/train_$NODE.jsonl /run/job/train.jsonl
cp {results}/x.json /run/job/x.json
[ "$NODE" = 1 ] || : > $SHARED/run.rdzv   # step 3: an empty file
export PYTHONPATH={root} OMP_NUM_THREADS=1
cd /run/job
for run in $(busybox seq {runs}); do
  before=$(busybox date +%s)
  {python} -m workflows.dqn --config /run/job/x.json --node_index=$NODE > out.json 2> log || {{ cat log; exit 1; }}
  echo "run $run: $(( $(busybox date +%s) - before )) s, files left on the share: $(busybox ls -A $SHARED)"
  [ "$NODE" = 1 ] || busybox sha256sum out/checkpoints/step_*/learner.safetensors
done
[ "$NODE" = 1 ] || cp -r out /run/results/out
"""


def steps(tmp_path: Path, runs: int, seconds: float) -> None:
    lines = rows_of_a_log(tmp_path, 400)
    whole = {"data": {"global_minibatch_size": len(lines)}, "epochs": 10}
    for node, part in enumerate(parts(lines, 2)):
        (tmp_path / f"train_{node}.jsonl").write_text("".join(part))
    place = {"training_data_path": "/run/job/train.jsonl", "model_output_path": "/run/job/out", "num_nodes": 2,
             "init_method": "file:///mnt/share/run.rdzv"}  # fmt: skip
    (tmp_path / "x.json").write_text(json.dumps(merged(BASE, {**place, **whole})))
    job = JOB.format(results=tmp_path, root=ROOT, runs=runs, python=sys.executable)
    ended = nfs_lab.run_on_two_machines(job, seconds, memory="2500M")
    for node in (0, 1):
        assert ended[node].code == 0, ended[node].output
        print(f"== node {node}\n{ended[node].output}")
    hashes = {line.split()[0] for line in ended[0].output.splitlines() if "learner.safetensors" in line}
    assert len(hashes) == 1
    assert ended[0].output.count("learner.safetensors") == runs
    same(learned(tmp_path / "out"), alone(tmp_path / "alone", lines, **whole), 1e-5)


@pytest.mark.nfs
@pytest.mark.usefixtures("need_nfs")
@pytest.mark.timeout(500)
def test_the_seven_steps_on_nfs(tmp_path: Path) -> None:
    steps(tmp_path, 1, 240)


@pytest.mark.nfs
@pytest.mark.slow
@pytest.mark.usefixtures("need_nfs")
@pytest.mark.timeout(7200)
def test_50_runs_in_a_row_on_nfs(tmp_path: Path) -> None:
    steps(tmp_path, 50, 6000)
