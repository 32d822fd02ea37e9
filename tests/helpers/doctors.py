"""What tests of the doctor share: a record of a run that is over, a store, rows by name."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

Rows = dict[str, list[dict[str, str]]]

RECORD = {
    "nonce": "0" * 32, "run": "old", "attempt": 0, "address": "127.0.0.1", "interface": "lo", "port": 1,
    "num_nodes": 2, "host": "elsewhere", "pid": 77, "started": "2026-01-01T00:00:00+00:00",
}  # fmt: skip
LOOPBACK = {"rendezvous": {"interface": "lo"}}


def failures(rows: Rows) -> list[str]:
    return sorted({row["name"] for several in rows.values() for row in several if row["state"] == "FAILED"})


def by_name(report: dict[str, Any]) -> Rows:
    """Returns the rows of the doctor's JSON line."""
    rows = report["rows"]
    return {name: [row for row in rows if row["name"] == name] for name in dict.fromkeys(row["name"] for row in rows)}


@contextmanager
def store() -> Iterator[Any]:
    yield dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
