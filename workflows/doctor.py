"""Look at machines before a run: python -m workflows.doctor --config x.json --node_index n, on each of them."""

import sys

from reagent_lite.doctor.doctor import main
from reagent_lite.training.stop import outliving_terminal

if __name__ == "__main__":
    try:
        with outliving_terminal():
            code = main()
        sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(130)
