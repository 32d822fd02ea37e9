"""Commands of workflows in this process: what they return, and what they write."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from helpers.runs import Tree

from reagent_lite.config import check
from reagent_lite.config.evaluate_config import EvaluateConfig
from reagent_lite.config.normalize_config import NormalizeConfig
from reagent_lite.config.score_config import ScoreConfig
from reagent_lite.tasks.evaluate import Evaluated, evaluate
from reagent_lite.tasks.normalize import Normalized, normalize
from reagent_lite.tasks.score import ScoredFile, score


def evaluated(model: Path | str, data: str | list[str], report: Path, /, **keys: Any) -> tuple[Evaluated, Tree]:
    """Evaluates a model on logs; returns the outcome and the report."""
    tree = {"model": str(model), "data_path": data, "output_path": str(report), **keys}
    outcome = evaluate(check(EvaluateConfig, tree))
    return outcome, json.loads(Path(outcome.report).read_text())


def normalized(data: str | list[str], folder: Path, /, *, norm: Tree | None = None, **keys: Any) -> Normalized:
    """Normalizes logs into a folder."""
    norm_params = {"output_dir": str(folder), **(norm or {})}
    return normalize(check(NormalizeConfig, {"training_data_path": data, "norm_params": norm_params, **keys}))


def scored(model: Path, data: Path, target: Path, /, **keys: Any) -> tuple[ScoredFile, pa.Table]:
    """Scores rows into a Parquet file; returns the outcome and what is in the file."""
    tree = {"model": str(model), "data_path": str(data), "output_path": str(target), **keys}
    return score(check(ScoreConfig, tree)), pq.read_table(target)
