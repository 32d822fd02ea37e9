"""A queue of runs on a real NFSv4.2: two machines with kernels of their own claim work by renames."""

import json
import sys

import pytest
from cluster import nfs_lab
from helpers.runs import ROOT

NAMES = 120
PROGRAM = f"""
import json, os, sys, time
from pathlib import Path
from reagent_lite.distributed.work_queue import WorkQueue, fill_queue
node, folder = int(sys.argv[1]), Path(sys.argv[2]) / "queue"
def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
if node == 0:
    (folder.parent / "new").mkdir()
    fill_queue(folder.parent / "new", [f"{{number:03}}" for number in range({NAMES})])
    (folder.parent / "new").rename(folder)
wait_until(lambda: "queue" in os.listdir(folder.parent))
queue = WorkQueue(folder, 3.0, polled_every=0.1)
(folder.parent / f"ready{{node}}").touch()
wait_until(lambda: {{"ready0", "ready1"}} <= {{*os.listdir(folder.parent)}})
claimed = []
while (name := queue.claim()) is not None:
    if node == 1 and len(claimed) == 3:
        print(json.dumps(claimed), name)  # claims one more, and is never heard of again
        sys.exit()
    claimed.append(name)
    assert queue.finish(name, {{"node": node}})
    time.sleep(0.02)
wait_until(lambda: queue.take_over())
name = queue.claim()
assert queue.finish(name, {{"node": node}})
assert len(queue.names("done")) == {NAMES} and not queue.names("held") and not queue.names("waiting")
print(json.dumps(claimed), name)
"""


@pytest.mark.slow
@pytest.mark.nfs
@pytest.mark.usefixtures("need_nfs")
def test_machines_claim_each_work_once_and_take_over_that_of_a_lost_one() -> None:
    job = (
        f"cat > /run/claims.py <<'END'\n{PROGRAM}\nEND\nPYTHONPATH={ROOT} {sys.executable} /run/claims.py $NODE $SHARED"
    )
    outputs = nfs_lab.run_on_two_machines(job, 120, memory="2000M")
    (first, taken), (second, left) = (output.splitlines()[-1].rsplit(" ", 1) for output in outputs)
    assert taken == left
    names = [*json.loads(first), *json.loads(second), taken]
    assert sorted(names) == [f"{number:03}" for number in range(NAMES)]
    assert len(json.loads(second)) == 3
