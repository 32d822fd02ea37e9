"""The oracle that starts runs as forks: what it is told comes in lines, of which several may arrive at once."""

import socket

from oracles.interpreters import Interpreter


def test_a_run_that_is_over_before_its_number_was_read() -> None:
    """On a busy machine the keeper has said pid and exit status before the test reads either."""
    ours, keeper = socket.socketpair()
    keeper.sendall(b"4711\n-9\n")
    run = Interpreter.__new__(Interpreter)
    run._connection, run.returncode = ours, None
    assert int(run._answer()) == 4711
    assert run.wait(1) == -9
    keeper.close()
