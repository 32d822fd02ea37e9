"""Score rows with an exported model: python -m workflows.score --model BUNDLE --data ROWS --output FILE."""

import os
import sys

if not __package__:  # python workflows/score.py: this folder would hide Python's own module inspect
    sys.path[0] = os.path.dirname(sys.path[0])

from reagent_lite.cli import Command, Flag, main_alone
from reagent_lite.config.score_config import ScoreConfig
from reagent_lite.export import load_bundle
from reagent_lite.tasks.score import score

COMMAND = Command(
    module="workflows.score",
    model=ScoreConfig,
    example="configs/cartpole/score.json",
    settings="--model outputs/new/model --data rows.parquet --output scores.parquet",
    outcome="scores, rows, undecided_rows, other_values, rows_per_second, seconds",
    flags={
        "model": Flag("--model", "folder of an exported model"),
        "data_path": Flag("--data", "the rows"),
        "output_path": Flag("--output", "the file of actions and scores"),
    },
    needs_config=False,
)

if __name__ == "__main__":
    sys.exit(main_alone(COMMAND, score, check=lambda config: load_bundle(config.model)))
