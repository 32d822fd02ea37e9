"""What may still be taken: by the kernel's own figures."""

from pathlib import Path

import psutil
import pytest
import torch

from reagent_lite import memory

CPU = torch.device("cpu")


def test_a_containers_limit_and_what_the_system_ended_for_lack_of_memory_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.oom_kills() == 0
    texts = {
        "memory.max": "1000000\n", "memory.current": "700000\n", "memory.stat": "anon 400000\ninactive_file 200000\n",
        "memory.events": "low 0\nmax 12\noom 3\noom_kill 2\n",
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    assert (memory.free_bytes(CPU), memory.oom_kills()) == (500_000, 2)  # what is cached from files can be given up
    (tmp_path / "memory.max").write_text("max\n")
    assert 500_000 < memory.free_bytes(CPU) <= psutil.virtual_memory().total
