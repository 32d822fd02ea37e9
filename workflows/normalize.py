"""Types, statistics and drift of features: python -m workflows.normalize --config x.json."""

import sys

from reagent_lite.config.normalize import NormalizeConfig
from workflows.command_line import Command, main_alone
from workflows.normalizing import normalize

COMMAND = Command(
    module="workflows.normalize",
    model=NormalizeConfig,
    example="configs/cartpole/normalize.json",
    settings="--set reference_data_path=last_month.parquet --set norm_params.output_dir=outputs/normalization",
    outcome="folder, skipped, parametric, rows, features, types, drift, seconds",
)

if __name__ == "__main__":
    sys.exit(main_alone(COMMAND, NormalizeConfig, normalize))
