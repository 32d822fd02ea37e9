"""Types, statistics and drift of features: python -m workflows.normalize --config x.json."""

import os
import sys

if not __package__:  # python workflows/normalize.py: this folder would hide Python's own module inspect
    sys.path[0] = os.path.dirname(sys.path[0])

from reagent_lite.cli import Command, main_alone
from reagent_lite.config.normalize_config import NormalizeConfig
from reagent_lite.tasks.normalize import normalize

COMMAND = Command(
    module="workflows.normalize",
    model=NormalizeConfig,
    example="configs/cartpole/normalize.json",
    settings="--set reference_data_path=last_month.parquet --set norm_params.output_dir=outputs/normalization",
    outcome="folder, skipped, parametric, rows, features, types, drift, seconds",
)

if __name__ == "__main__":
    sys.exit(main_alone(COMMAND, normalize))
