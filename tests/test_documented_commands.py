"""Commands in the documentation have names, options, keys and files that exist."""

import contextlib
import io
import re
import runpy
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import ROOT

from reagent_lite.config import DqnConfig
from reagent_lite.config.compare_config import CompareConfig
from reagent_lite.config.convert_config import ConvertConfig
from reagent_lite.config.evaluate_config import EvaluateConfig
from reagent_lite.config.inspect_config import InspectConfig
from reagent_lite.config.normalize_config import NormalizeConfig
from reagent_lite.config.rollout_config import RolloutConfig
from reagent_lite.config.score_config import ScoreConfig
from reagent_lite.config.section import Section
from reagent_lite.config.serve_config import ServeConfig
from reagent_lite.config.shard_config import ShardConfig
from reagent_lite.config.simulate_config import SimulateConfig
from reagent_lite.config.timeline_config import TimelineConfig

PATTERNS = ("*.md", "Makefile", "docs/*.md", "configs/**/*.md", "deploy/**/*.md",
            "deploy/**/*.yaml", "deploy/**/*.sbatch",
            "reagent_lite/**/*.md", "tests/**/*.md")  # fmt: skip
PAGES = sorted({page for pattern in PATTERNS for page in ROOT.glob(pattern)} - {ROOT / "CHANGELOG.md"})
CONFIGS: dict[str, type[Section]] = {
    **dict.fromkeys(("train", "dqn", "parametric_dqn", "doctor"), DqnConfig),
    "compare": CompareConfig, "convert": ConvertConfig, "evaluate": EvaluateConfig, "inspect": InspectConfig,
    "normalize": NormalizeConfig, "rollout": RolloutConfig, "score": ScoreConfig, "serve": ServeConfig,
    "shard": ShardConfig, "simulate": SimulateConfig, "timeline": TimelineConfig,
}  # fmt: skip
COMMAND = re.compile(r"(?:\bworkflows\.|\breagent-lite )(\w+)([^`\n|#&;)]*)")
BENCHMARK = re.compile(r"-m\s+tests\.benchmarks\.(\w+)([^`\n|#&;)]*)")
KEY = re.compile(r"--set[= ]+['\"]?([\w.]+)=")
OPTION = re.compile(r"(?<![\w-])(--?[a-z][\w-]*)")
FILE = re.compile(r"(?<![\w/.-])((?:configs|tests|docs|deploy|kernels)/[\w./-]+\.(?:json|py|md|csv|yaml|sbatch|cuh))\b")


def commands(pattern: re.Pattern[str]) -> Iterator[tuple[str, str, str]]:
    """Yields (page, name, arguments) of the commands that the pages have, also over several lines."""
    for page in PAGES:
        text = re.sub(r"\s*\\\n\s*", " ", page.read_text())
        for name, arguments in pattern.findall(text):
            if OPTION.search(arguments):
                yield str(page.relative_to(ROOT)), name, arguments


@cache
def options(name: str) -> frozenset[str]:
    """Returns the options in the help of a workflow."""
    out = io.StringIO()
    arguments = sys.argv
    sys.argv = [name, "--help"]
    try:
        with contextlib.redirect_stdout(out), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # other tests may have imported it
            with pytest.raises(SystemExit):
                runpy.run_module(f"workflows.{name}", run_name="__main__", alter_sys=False)
    finally:
        sys.argv = arguments
    return frozenset(OPTION.findall(out.getvalue()))


def has_key(section: type[Section], key: str) -> bool:
    """Returns whether a config accepts a key; an object of names or of anything accepts all of its keys."""
    name, _, inner = key.partition(".")
    if key in section.renamed:
        return True
    if name not in section.model_fields:
        return False
    kinds = [section.model_fields[name].annotation, *getattr(section.model_fields[name].annotation, "__args__", ())]
    sections: list[Any] = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
    return not inner or not sections or any(has_key(kind, inner) for kind in sections)


def test_options_and_keys_of_commands_exist() -> None:
    unknown = []
    for page, name, arguments in commands(COMMAND):
        if not (ROOT / f"workflows/{name}.py").is_file():
            unknown.append(f"{page}: {name}")
            continue
        keys = KEY.findall(arguments) if name in CONFIGS else []
        unknown += [f"{page}: {name} {key}" for key in keys if not has_key(CONFIGS[name], key)]
        used = OPTION.findall(re.sub(r"'[^']*'", "''", arguments))
        unknown += [f"{page}: {name} {option}" for option in used if option not in options(name)]
    assert unknown == []


def test_options_of_benchmarks_exist() -> None:
    unknown = []
    for page, name, arguments in commands(BENCHMARK):
        file = ROOT / f"tests/benchmarks/{name}.py"
        source = file.read_text() if file.is_file() else ""
        used = OPTION.findall(re.sub(r"'[^']*'", "''", arguments))
        unknown += [f"{page}: {name} {each}" for each in used if not re.search(rf'"{each}"|\b{each[2:]}=', source)]
    assert unknown == []


def test_files_and_targets_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    missing = []
    for page in PAGES:
        text = page.read_text()
        name = page.relative_to(ROOT)
        missing += [f"{name}: {file}" for file in FILE.findall(text) if not is_file(page, file)]
        missing += [f"{name}: make {each}" for each in re.findall(r"`make (\w+)", text) if each not in targets]
    assert missing == []


def is_file(page: Path, file: str) -> bool:
    return any((folder / file).is_file() for folder in (ROOT, page.parent, ROOT / "reagent_lite"))
