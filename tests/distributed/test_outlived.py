"""A wrapped module that outlives its process group."""

from pathlib import Path

from oracles.ranks import end_ranks, start_ranks

WORKER = str(Path(__file__).with_name("outlived_worker.py"))


def test_a_wrapped_module_may_outlive_its_group(tmp_path: Path) -> None:
    """Else a run that fails between two steps could wait for ever instead of ending."""
    assert end_ranks(start_ranks(2, [WORKER], tmp_path), 60) == [0, 0]
