"""Stores that accept connections and stay silent, or come back while this process exits."""

import os
import socket
import subprocess
import sys
import threading

import pytest

from reagent_lite.distributed import store
from reagent_lite.distributed.store import Link, LostError, connect

SCRIPT = """
import os, signal, subprocess, sys, time
from reagent_lite.distributed.store import Link, LostError, connect

SERVER = '''
import time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(100)
'''

class Late:
    def __del__(self, kill=os.kill, sleep=time.sleep):  # as modules are cleared, after daemon threads were to end
        kill(self.pid, 18)
        sleep(0.3)
        kill(self.pid, 9)

server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE)
port = int(server.stdout.readline())
link = Link(lambda: connect("127.0.0.1", port, ""), ("127.0.0.1", port))
print(link.call(lambda store: store.get("key")))
os.kill(server.pid, signal.SIGSTOP)
os.waitpid(server.pid, os.WUNTRACED)
try:
    link.call(lambda store: store.get("key"), 0.3)
except LostError as error:
    print(error)
link.close()
late = Late()
late.pid = server.pid
"""


def test_a_call_that_never_came_back_does_not_abort_the_process_on_its_way_out() -> None:
    quiet = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}  # as workflows set it
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, env=quiet)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "None\nno answer for 0 s\n", "")


def test_a_store_that_never_opened_leaves_no_thread_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_OPEN_SECONDS", 2.0)  # torch connects again until then
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port, before = silent.getsockname()[1], {*threading.enumerate()}
        link = Link(lambda: connect("127.0.0.1", port, ""), ("127.0.0.1", port))
        (thread,) = {*threading.enumerate()} - before
        with pytest.raises(LostError, match="no answer"):
            link.call(lambda store: store.get("key"), 0.2)
        assert thread.is_alive()
        link.close()
        assert not thread.is_alive()
