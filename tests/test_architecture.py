"""Packages: imports go downwards only, packages of one layer never import each other."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from helpers.runs import ROOT

LAYERS = {
    "types": 0, "errors": 0, "config": 0, "manifest": 0, "memory": 0, "console": 0, "strict_json": 0,
    "whole_files": 0, "folder_identity": 0, "disk_room": 0, "folder_lock": 0, "shipped": 0,
    "estimator_names": 0,
    "feature_ids": 0, "feature_values": 0, "raw_values": 0, "categories": 0,
    "item_table": 0, "id_values": 0,
    "mounts": 0,
    "__version__": 0,
    "distributed": 1,
    "rl": 2,
    "models": 3, "data": 3, "sim": 3,
    "algorithms": 4, "export": 4, "training": 4,
    "evaluation": 5, "cli": 5,
    "report": 6,
    "run": 7,
    "doctor": 8, "serving": 8,
    "tasks": 9,
    "api": 10,
}  # fmt: skip
DATA_LAYERS = {
    "faults_by_kind": -1, "result_frames": -1,
    "formats": 0,
    "rows": 1, "log_shares": 1, "served_log": 1,
    "features": 2, "writing": 2, "stage_folder": 2,
    "partition": 3,
    "logs": 4,
    "timeline": 5, "tables": 5, "rollout_rows": 5,
    "copy": 6, "shard_files": 6,
    "sampling": 7, "episode_folder": 7, "inspection": 7,
}  # fmt: skip
VERBS_IN_ED = {"embed", "exceed", "feed", "need", "seed", "speed"}
PARTICIPLES = {
    "built",
    "chosen",
    "drawn",
    "given",
    "kept",
    "known",
    "left",
    "made",
    "shown",
    "sent",
    "taken",
    "written",
}
SCIENCE = {("tasks", "scoring"), ("tasks", "run_statistics")}
FILES = sorted((ROOT / "reagent_lite").rglob("*.py"))


def imported(file: Path) -> set[str]:
    """All modules a file imports, type-checking-only and in-function imports included."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    parts = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    assert not any(node.level for node in parts), f"{file}: relative import"
    whole = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return whole | {f"{node.module}.{alias.name}" for node in parts for alias in node.names}


@pytest.mark.parametrize("file", FILES[1:], ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_go_down(file: Path) -> None:
    _, own, *rest = file.relative_to(ROOT).with_suffix("").parts
    assert own in LAYERS, f"{file}: a package without a layer"
    modules = imported(file)
    tops = {module.split(".")[0] for module in modules}
    # mlflow and wandb by their names where a config asks for them
    assert not tops & {"tests", "workflows", "mlflow", "wandb"}
    assert not tops & {"pandas", "pyarrow", "scipy"} or own == "data" or (own, *rest) in SCIENCE
    below = [LAYERS[name] for name in inner(modules, "reagent_lite", 1) - {own}]
    assert all(layer < LAYERS[own] or layer == LAYERS[own] == 0 for layer in below), sorted(modules)
    if own == "data":
        others = inner(modules, "reagent_lite.data", 2) - {rest[0]}
        assert all(DATA_LAYERS[name] < DATA_LAYERS[rest[0]] for name in others), sorted(modules)


def test_a_function_is_called_by_a_verb() -> None:
    names = {
        part.name.strip("_")
        for file in FILES
        for part in ast.walk(ast.parse(file.read_text()))
        if isinstance(part, ast.FunctionDef) and not any("property" in ast.unparse(d) for d in part.decorator_list)
    }
    participles = names & PARTICIPLES | {name for name in names - VERBS_IN_ED if re.fullmatch("[a-z]+ed", name)}
    assert not participles


def test_a_name_is_that_of_one_module_or_public_function() -> None:
    files = [file for file in FILES if file.stem not in ("__init__", "api")]  # api.py has the names of the commands
    trees = [ast.parse(file.read_text()) for file in files]
    public = [part.name for tree in trees for part in tree.body if isinstance(part, ast.FunctionDef | ast.ClassDef)]
    modules = Counter(file.stem for file in files)
    names = Counter(name for name in public if not name.startswith("_"))
    assert [name for name, count in (modules + names).items() if max(modules[name], names[name]) > 1] == []


def test_no_pickle_and_no_object_collectives() -> None:
    words = "import pickle|torch.load[(]|torch.save[(]|all_gather_object|broadcast_object|gather_object"
    files = (*FILES, *(ROOT / "workflows").glob("*.py"))
    assert [str(file) for file in files if re.search(words, file.read_text())] == []


def test_folders_have_a_readme() -> None:
    packages = [file.parent for file in (ROOT / "reagent_lite").glob("*/__init__.py")]
    folders = [*map(ROOT.joinpath, ("reagent_lite", "workflows", "kernels", "configs", "deploy", "tests")), *packages]
    assert [folder for folder in folders if not (folder / "README.md").is_file()] == []


def test_every_kernel_sample_config_and_guide_is_in_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    packed = {(folder, file) for folder, names in listed.items() for name in names for file in ROOT.glob(name)}
    tracked = subprocess.check_output(["git", "ls-files", "kernels", "configs", "docs"], cwd=ROOT, text=True)
    sources = [Path(file) for file in tracked.split() if file.startswith("configs/") or Path(file).suffix == ".cuh"]
    sources += [file.relative_to(ROOT) for file in (ROOT / "docs").glob("*.md")]
    assert packed == {(f"share/reagent-lite/{file.parent}", ROOT / file) for file in sources}


def test_what_prepares_data_or_serves_does_without_torch() -> None:
    """Torch takes 1.3 s and 180 MB, which a stage that is skipped or bounded in memory need not."""
    code = """
import importlib, sys
for workflow in ("timeline", "normalize", "shard", "convert", "inspect", "serve"):
    importlib.import_module(f"workflows.{workflow}")
    if "torch" in sys.modules:
        sys.exit(f"{workflow} imports torch")
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def inner(modules: set[str], package: str, depth: int) -> set[str]:
    """Names of the modules within a package, at a depth."""
    parts = [module.split(".") for module in modules if f"{module}.".startswith(f"{package}.")]
    return {names[depth] for names in parts if len(names) > depth}
