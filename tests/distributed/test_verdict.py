"""Declarations that fit together, and those that do not."""

from pathlib import Path

from reagent_lite.distributed.verdict import Declaration, compare, digest_of_code, shared_keys


def machine(node: int, **changes: object) -> Declaration:
    fields = {
        "node": node, "host": f"h{node}", "pid": 7, "processes": 2, "device": "cuda",
        "versions": {"torch": "2.13.0", "nccl": "2.27.3"}, "gpus": (f"GPU-{node}",), "config": {"epochs": 1},
    }  # fmt: skip
    return Declaration(**{**fields, **changes})


def test_equal_machines_fit_whatever_their_process_counts() -> None:
    assert compare([machine(0), machine(1, processes=8), machine(2)]) == ([], [])


def test_keys_that_differ_are_named_with_both_values() -> None:
    problems, _ = compare([machine(0), machine(1, config={"epochs": 2, "seed": 3})])
    assert [str(problem) for problem in problems] == [
        "config key epochs: expected 1 as on node 0 (host h0, pid 7), got 2 on node 1 (host h1, pid 7)",
        "config key seed: expected None as on node 0 (host h0, pid 7), got 3 on node 1 (host h1, pid 7)",
    ]


def test_minor_releases_are_errors_and_patches_warnings() -> None:
    versions = ({"torch": "2.13.1", "nccl": "2.28.0"}, {"torch": "2.13.0"})
    problems, warnings = compare([machine(0), *(machine(node, versions=v) for node, v in enumerate(versions, 1))])
    assert [(problem.where, problem.got) for problem in problems] == [
        ("version of nccl", "2.28.0 on node 1 (host h1, pid 7)"),
        ("version of nccl", "none on node 2 (host h2, pid 7)"),
    ]
    assert warnings == ["torch is 2.13.0 on node 0 (host h0, pid 7) and 2.13.1 on node 1 (host h1, pid 7)"]


def test_another_commit_of_one_release_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "package" / "part.py"
    file.parent.mkdir()
    file.with_name(".#part.py").symlink_to("nowhere")  # as an editor that has the file open
    digests = []
    for text in ("a = 1", "a = 2", "a = 1"):
        file.write_text(text)
        digests.append(digest_of_code(tmp_path))
    file.rename(tmp_path / "part.py")
    assert (digests[0] == digests[2], len({*digests, digest_of_code(tmp_path)})) == (True, 3)
    versions = [{"torch": "2.13.0", "reagent-lite's code": digest} for digest in digests[:2]]
    ((problem,), _) = compare([machine(node, versions=given) for node, given in enumerate(versions)])
    assert problem.where == "version of reagent-lite's code"
    assert (digests[0] in problem.expected, digests[1] in problem.got) == (True, True)


def test_one_gpu_twice_and_a_machine_without() -> None:
    problems, _ = compare([machine(0), machine(1, gpus=("GPU-0",)), machine(2, device="cpu", gpus=())])
    assert [(problem.where, problem.got) for problem in problems] == [
        ("devices", "cpu on node 2 (host h2, pid 7)"),
        ("GPU GPU-0", "also by node 1 (host h1, pid 7)"),
    ]


def test_keys_of_one_machine_are_left_out() -> None:
    tree = {"epochs": 1, "node_index": 1, "data": {"layout": "shards", "training_copy_dir": "/a"}}
    assert shared_keys(tree) == {"epochs": 1, "data.layout": "shards"}
