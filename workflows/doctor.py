"""Look at machines before a run: python -m workflows.doctor --config x.json --node_index n, on each of them."""

import sys

from workflows.doctoring import main

if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
