"""Packages: imports go downwards only, packages of one layer never import each other."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = {
    "types": 0, "errors": 0, "config": 0, "files": 0, "manifest": 0, "memory": 0, "console": 0, "strict_json": 0,
    "estimators": 0,
    "feature_ids": 0, "categories": 0,
    "item_table": 0,
    "mounts": 0,
    "__version__": 0,
    "distributed": 1,
    "rl": 2,
    "models": 3, "data": 3, "sim": 3,
    "algorithms": 4, "export": 4, "training": 4,
    "evaluation": 5, "cli": 5,
    "report": 6,
    "run": 7,
    "doctor": 8, "serving": 8, "tasks": 8,
    "api": 9,
}  # fmt: skip
DATA_LAYERS = {
    "faults_by_kind": -1, "result_frames": -1,
    "formats": 0,
    "rows": 1, "buckets": 1, "log_shares": 1,
    "features": 2, "writing": 2, "stage": 2, "logs": 2,
    "timeline": 3, "tables": 3,
    "copy": 4,
    "sampling": 5, "shards": 5, "dataset": 5, "inspection": 5,
}  # fmt: skip
HEAVY = {"pandas", "pyarrow", "scipy"}
FILES = sorted((ROOT / "reagent_lite").rglob("*.py"))


def imported(file: Path) -> set[str]:
    """All modules a file imports, type-checking-only and in-function imports included."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def package(module: str) -> str:
    return module.split(".")[1]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_go_down(file: Path) -> None:
    parts = file.relative_to(ROOT).with_suffix("").parts
    if len(parts) == 2 and parts[1] == "__init__":
        return
    own = parts[1]
    assert own in LAYERS, f"{file}: a package without a layer"
    for module in imported(file):
        top = module.split(".")[0]
        assert top != "tests", f"{file} imports {module}"
        assert top != "workflows", f"{file} imports {module}"
        assert top not in ("mlflow", "wandb"), f"{file} imports {module}, not by its name where a config asks for it"
        if top == "reagent_lite" and package(module) != own:
            assert LAYERS[package(module)] < LAYERS[own] or LAYERS[own] == 0, f"{file} imports {module}"
            if LAYERS[own] == 0:
                assert LAYERS[package(module)] == 0, f"{file} imports {module}"
        if top in HEAVY:
            assert own == "data" or parts[1:] == ("tasks", "scoring"), f"{file} imports {module}"


@pytest.mark.parametrize(
    "file", sorted((ROOT / "reagent_lite/data").rglob("*.py")), ids=lambda f: f"{f.parent.name}/{f.stem}"
)
def test_packages_of_data_import_downwards(file: Path) -> None:
    own = file.relative_to(ROOT / "reagent_lite/data").with_suffix("").parts[0]
    for module in imported(file):
        parts = module.split(".")
        if parts[:2] == ["reagent_lite", "data"] and len(parts) > 2 and parts[2] != own:
            assert DATA_LAYERS[parts[2]] < DATA_LAYERS[own], f"{file} imports {module}"


def test_no_pickle_and_no_object_collectives() -> None:
    words = ("import pickle", "torch.load(", "torch.save(", "all_gather_object", "broadcast_object", "gather_object")
    used = [
        (str(file), word)
        for file in (*FILES, *(ROOT / "workflows").glob("*.py"))
        for word in words
        if word in file.read_text()
    ]
    assert used == []


def test_folders_have_a_readme() -> None:
    folders = ["reagent_lite", "workflows", "kernels", "configs", "deploy", "tests"]
    folders += [
        f"reagent_lite/{path.name}" for path in (ROOT / "reagent_lite").iterdir() if (path / "__init__.py").exists()
    ]
    assert [name for name in folders if not (ROOT / name / "README.md").is_file()] == []


def test_every_kernel_and_sample_config_is_in_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    packed = {file for patterns in listed.values() for pattern in patterns for file in ROOT.glob(pattern)}
    sources = {file for file in (ROOT / "kernels").rglob("*") if file.is_file() and file.suffix != ".md"}
    assert sources | {file for file in (ROOT / "configs").rglob("*") if file.is_file()} == packed
    places = {folder.removeprefix("share/reagent-lite/"): patterns for folder, patterns in listed.items()}
    assert all(pattern.rpartition("/")[0] == folder for folder, patterns in places.items() for pattern in patterns)


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
