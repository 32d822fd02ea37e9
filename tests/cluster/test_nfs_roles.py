"""A learner and collectors on two machines with a real NFSv4.2 between them."""

import json
import re
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from cluster import nfs_lab
from helpers.roles import role, whole_files
from helpers.runs import ROOT

STEPS, WARM_UP, ENVS = 20_000, 1000, 8
# Machine 0 learns, machine 1 collects, with a clock an hour ahead. What they say goes to the real machine's files.
JOB = """
set -e
mkdir -p /run/said
busybox mount -t hostfs none /run/said -o {folder}/said
cd /run/said
export PYTHONPATH={root} OMP_NUM_THREADS=1 REAGENT_LITE_CACHE=/run/kernels
alive() {{ kill -0 $1 2> /dev/null || {{ busybox cat *.log; exit 1; }}; busybox sleep 0.1; }}
files() {{ busybox ls $SHARED/data/fifo 2>/dev/null | busybox grep -c parquet || true; }}
until_files() {{ while [ $(files) -lt $1 ]; do alive $!; done; }}
until_said() {{ until busybox grep -qs "$1" $2; do alive $!; done; }}
busybox mount | busybox grep ' on /mnt/share type nfs4 (rw,relatime,vers=4.2,'

if [ $NODE = 0 ]; then
  echo "clock $(busybox date +%s)"
  {python} {folder}/watch.py $SHARED/data > watched.json & watcher=$!
  {python} -m workflows.dqn --config {folder}/learn.json > learn.json 2> learn.log & learner=$!
  until_said . killed
  busybox dd if=/dev/zero bs=64k of=$SHARED/ballast 2> /dev/null || true
  # whoever writes next: a collector whose rows are not learned from yet waits for the learner's progress
  until_said 'no room for\\|was not published' 'third.log learn.log'
  echo "full: $(busybox df -k $SHARED | busybox tail -1)"
  busybox rm $SHARED/ballast
  wait $learner || {{ busybox cat learn.log; exit 1; }}
  : > $SHARED/data/ended
  wait $watcher
  until [ -e done ]; do busybox sleep 0.1; done
  busybox cp -r $SHARED/data .
else
  busybox date -s @$(($(busybox date +%s) + 3600)) > /dev/null
  echo "clock $(busybox date +%s)"
  collect() {{ {python} -m workflows.dqn --config {folder}/collect.json > $1.json 2> $1.log & }}
  for name in first second; do
    collect $name
    until_said 'collecting in' $name.log
    until_files $(($(files) + 3))
    kill -9 $!
    left=$(busybox ls -A $SHARED/data/fifo | busybox grep -c tmp || true)
    echo "killed $name at $(files) files, half-written: $left"
  done
  collect third
  echo both > killed
  wait $! || {{ busybox cat third.log; exit 1; }}
  echo yes > done
  while [ ! -e $OUT/0.status ]; do busybox sleep 0.2; done
fi
"""
# Reads each file at the moment at which its name is there, as long as the run lasts.
WATCH = """
import json, sys, time
from pathlib import Path
folder, whole = Path(sys.argv[1]), {}
while not (folder / "ended").exists():
    for file in (folder / "fifo").glob("*.parquet"):
        if file.name not in whole:
            data = file.read_bytes()
            whole[file.name] = [len(data), data[:4] == data[-4:] == b"PAR1"]
    time.sleep(0.02)
print(json.dumps(whole))
"""


@pytest.mark.slow
@pytest.mark.nfs
@pytest.mark.usefixtures("need_nfs")
@pytest.mark.timeout(900)
def test_a_learner_and_collectors_over_nfs(tmp_path: Path) -> None:
    """Two collectors are killed and the share is full for a while: the run has what a quiet one has."""
    said = tmp_path / "said"
    said.mkdir()
    changes = {"total_steps": STEPS, "warmup_steps": WARM_UP, "num_envs": ENVS,
               "dataset": {"path": "/mnt/share/data", "publish_every_steps": 50}}  # fmt: skip
    for mode in ("learn", "collect"):
        (tmp_path / f"{mode}.json").write_text(
            json.dumps(role(tmp_path, mode, **changes) | {"model_output_path": "/run/model"})
        )
    (tmp_path / "watch.py").write_text(WATCH)
    outputs = nfs_lab.run_on_two_machines(JOB.format(folder=tmp_path, root=ROOT, python=sys.executable), 600, "2500M")
    print(*outputs, sep="\n==\n")
    clocks = [int(re.findall(r"clock (\d+)", output)[0]) for output in outputs]
    assert 3500 < clocks[1] - clocks[0] < 3700

    policies = sorted((said / "data" / "policies").glob("0*"))
    progress = json.loads((policies[-1] / "manifest.json").read_text())["progress"]
    files = sorted((said / "data" / "fifo").glob("*.parquet"))
    sizes = [int(file.name.split("-")[1]) for file in files]
    outcomes = {name: json.loads((said / f"{name}.json").read_text().splitlines()[-1]) for name in ("learn", "third")}
    played = [json.loads(pq.read_schema(file).metadata[b"reagent_lite"])["policy"] for file in files]
    assert progress["finished"]
    assert STEPS <= progress["env_steps"] < STEPS + max(sizes)
    assert outcomes["learn"]["steps"] == (STEPS - WARM_UP) // ENVS
    assert outcomes["third"]["policy"] == int(policies[-1].name)
    assert len(set(played)) > 10
    assert whole_files(said) == sum(sizes) >= progress["env_steps"]
    assert "left out" not in (said / "learn.log").read_text()
    watched = json.loads((said / "watched.json").read_text())
    assert watched == {file.name: [file.stat().st_size, True] for file in files if file.name in watched}
    assert len(watched) > len(files) / 2
