"""Stores that accept connections and stay silent, or come back while this process exits."""

import os
import socket
import subprocess
import sys
import threading
from unittest.mock import Mock

import pytest
from helpers.doctors import RECORD

from reagent_lite.distributed import key_value_store
from reagent_lite.distributed.key_value_store import Link, reach
from reagent_lite.distributed.meeting_file import Record

SCRIPT = """
import os, signal, time
import torch.distributed as dist
from reagent_lite.distributed.key_value_store import Link, LostError

class Late:
    def __del__(self, kill=os.kill, sleep=time.sleep):  # as modules are cleared, after daemon threads were to end
        kill(self.pid, 18)
        sleep(0.3)
        kill(self.pid, 9)

reading, writing = os.pipe()
server = os.fork()
if not server:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writing, str(store.port).encode())
    time.sleep(100)
link = Link.to("127.0.0.1", int(os.read(reading, 9)), "", 15.0)
print(link.call(lambda store: store.get("key")))
os.kill(server, signal.SIGSTOP)
os.waitpid(server, os.WUNTRACED)
try:
    link.call(lambda store: store.get("key"), 0.3)
except LostError as error:
    print(error)
link.close()
late = Late()
late.pid = server
"""


def test_a_call_that_never_came_back_does_not_abort_the_process_on_its_way_out() -> None:
    quiet = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}  # as workflows set it
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, env=quiet)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "None\nno answer for 0 s\n", "")


def test_a_store_that_never_opened_leaves_no_thread_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C comes at once, while torch would try to connect for two more seconds."""
    monkeypatch.setattr(key_value_store, "_OPEN_SECONDS", 1.0)
    monkeypatch.setattr(Link, "call", Mock(side_effect=KeyboardInterrupt))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        before = {*threading.enumerate()}
        with pytest.raises(KeyboardInterrupt):
            reach(Record.model_validate(RECORD | {"port": silent.getsockname()[1]}))
        assert {*threading.enumerate()} == before
