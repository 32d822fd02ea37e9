"""What may still be taken: by the kernel's own figures."""

from pathlib import Path

import pytest
import torch

from reagent_lite import memory

CPU = torch.device("cpu")


def test_free_memory_is_what_the_kernel_says() -> None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    assert 0 < memory.free_bytes(CPU) <= total


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 400000\ninactive_file 200000\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.free_bytes(CPU) == 500_000  # what is cached from files can be given up
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_bytes(CPU) > 500_000


def test_what_the_system_ended_for_lack_of_memory_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.oom_kills() == 0
    (tmp_path / "memory.events").write_text("low 0\nmax 12\noom 3\noom_kill 2\n")
    assert memory.oom_kills() == 2
