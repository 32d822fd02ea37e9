"""Calls a function of a test module in one process of a group; ranks.call_on_ranks starts it in all of them.

on_ranks.py FILE FUNCTION ARGUMENT… prints, as JSON, what FUNCTION(group, ARGUMENT…) returns.
"""

import importlib
import json
import sys
from pathlib import Path

import torch

from reagent_lite.console import log_as, logging_to_stderr
from reagent_lite.distributed.group import ProcessRanks, join_group

if __name__ == "__main__":
    file, function, *arguments = sys.argv[1:]
    sys.path.insert(0, str(Path(file).parent))
    place = ProcessRanks.read()
    log_as(place.rank)
    with logging_to_stderr(), join_group(place, torch.device("cpu"), timeout_seconds=120) as group:
        print(json.dumps(getattr(importlib.import_module(Path(file).stem), function)(group, *arguments)))
