"""Look at machines before a run: python -m workflows.doctor --config x.json --node_index n, on each of them."""

import sys

from reagent_lite.console import logging_to_stderr, outliving_terminal
from reagent_lite.doctor.doctor import main

if __name__ == "__main__":
    try:
        with outliving_terminal(), logging_to_stderr():
            code = main()
        sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(130)
