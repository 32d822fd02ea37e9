"""Compare two policies that share a server: python -m workflows.rollout --log FOLDER.

1 read     the rows of the log that say which policy decided, with both policies' probabilities
2 compare  unit by unit, with intervals that hold at every moment; as the server does, to the last digit
3 audit    events of the server (shares, stop, promotion) next to the same figures from the files
"""

import os
import sys

if not __package__:  # python workflows/rollout.py: this folder would hide Python's own module inspect
    sys.path[0] = os.path.dirname(sys.path[0])

from reagent_lite.cli import Command, Flag, main_alone
from reagent_lite.config.rollout_config import RolloutConfig
from reagent_lite.tasks.rollout import compare

COMMAND = Command(
    module="workflows.rollout",
    model=RolloutConfig,
    example="configs/serve/rollout.json",
    settings="--log outputs/served --set comparison.reward_range=[0,1]",
    outcome="rollout, comparison, rows, waiting_units, late_rows, wrong_propensities, events, different_events",
    flags={"log": Flag("--log", "the log"), "rollout": Flag("--rollout", "id of one of several rollouts")},
    needs_config=False,
)

if __name__ == "__main__":
    sys.exit(main_alone(COMMAND, compare))
