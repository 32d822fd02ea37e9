"""Declarations that fit together, and those that do not."""

from pathlib import Path
from typing import Any

import pytest

from reagent_lite.distributed.declarations import Declaration, compare_declarations, digest_of_code, shared_keys


def machine(node: int, **changes: object) -> Declaration:
    fields = {
        "node": node, "host": f"h{node}", "pid": 7, "processes": 2, "device": "cuda",
        "versions": {"torch": "2.13.0", "nccl": "2.27.3", "reagent-lite's code": "a"},
        "gpus": (f"GPU-{node}",), "config": {"epochs": 1},
    }  # fmt: skip
    return Declaration(**{**fields, **changes})


@pytest.mark.parametrize(
    ("others", "problems", "warnings"),
    [
        ([{"processes": 8}, {}], [], []),
        (
            [{"config": {"epochs": 2, "seed": 3}}],
            [
                ("config key epochs", "1 as on node 0 (host h0, pid 7)", "2 on node 1 (host h1, pid 7)"),
                ("config key seed", "None as on node 0 (host h0, pid 7)", "3 on node 1 (host h1, pid 7)"),
            ],
            [],
        ),
        # minor releases are errors and so are other commits of one release, patches warnings
        (
            [
                {"versions": {"torch": "2.13.1", "nccl": "2.28.0", "reagent-lite's code": "a"}},
                {"versions": {"torch": "2.13.0", "reagent-lite's code": "b"}},
            ],
            [
                ("version of nccl", "2.27.3 as on node 0 (host h0, pid 7)", "2.28.0 on node 1 (host h1, pid 7)"),
                ("version of nccl", "2.27.3 as on node 0 (host h0, pid 7)", "none on node 2 (host h2, pid 7)"),
                ("version of reagent-lite's code", "a as on node 0 (host h0, pid 7)", "b on node 2 (host h2, pid 7)"),
            ],
            ["torch is 2.13.0 on node 0 (host h0, pid 7) and 2.13.1 on node 1 (host h1, pid 7)"],
        ),
        (
            [{"gpus": ("GPU-0",)}, {"device": "cpu", "gpus": ()}],
            [
                ("devices", "cuda as on node 0 (host h0, pid 7)", "cpu on node 2 (host h2, pid 7)"),
                ("GPU GPU-0", "used by node 0 (host h0, pid 7) alone", "also by node 1 (host h1, pid 7)"),
            ],
            [],
        ),
    ],
)
def test_what_differs_between_machines_is_named_with_both_values(
    others: list[dict[str, Any]], problems: list[tuple[str, ...]], warnings: list[str]
) -> None:
    result = compare_declarations([machine(0), *(machine(node, **changes) for node, changes in enumerate(others, 1))])
    assert [(problem.where, problem.expected, problem.got) for problem in result[0]] == problems
    assert result[1] == warnings


def test_another_commit_of_one_release_has_another_digest(tmp_path: Path) -> None:
    file = tmp_path / "package" / "part.py"
    file.parent.mkdir()
    file.with_name(".#part.py").symlink_to("nowhere")  # as an editor that has the file open
    digests = []
    for text in ("a = 1", "a = 2", "a = 1"):
        file.write_text(text)
        digests.append(digest_of_code(tmp_path))
    file.rename(tmp_path / "part.py")
    assert (digests[0] == digests[2], len({*digests, digest_of_code(tmp_path)})) == (True, 3)


def test_keys_of_one_machine_are_left_out() -> None:
    tree = {"epochs": 1, "node_index": 1, "data": {"layout": "shards", "training_copy_dir": "/a"}}
    assert shared_keys(tree) == {"epochs": 1, "data.layout": "shards"}
