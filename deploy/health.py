"""HEALTHCHECK of the image: exit code 0 if the container's server answers /healthz with 200, or if it has no server.

HEALTH_URL in the environment names another port, or https, whose certificate is not checked.
"""

import os
import ssl
import sys
import urllib.request
from pathlib import Path


def main(command: bytes, url: str) -> int:
    """Returns the exit code for the command line of the container's first process."""
    if b"workflows.serve" not in command:
        return 0
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=4, context=context) as answer:
            return int(answer.status != 200)
    except OSError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    health_url = os.environ.get("HEALTH_URL", "http://127.0.0.1:8000/healthz")
    sys.exit(main(Path("/proc/1/cmdline").read_bytes(), health_url))
