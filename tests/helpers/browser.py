"""A real browser, spoken to through its DevTools pipe: what a page shows, asks for and complains of.

Protocol: https://chromedevtools.github.io/devtools-protocol/, messages on descriptors 3 and 4, each ended by a NUL.
"""

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="there is no chromium here")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--disable-dev-shm-usage", "--remote-debugging-pipe", "--host-resolver-rules=MAP * ~NOTFOUND")  # fmt: skip


class Browser:
    """One tab. `events` are all that it has sent so far."""

    def __init__(self, write: int, read: int) -> None:
        self._write = write
        self._read = read
        self._rest = b""
        self._count = 0
        self.events: list[dict[str, Any]] = []
        self._session: dict[str, str] = {}
        self._session = self.ask(
            "Target.attachToTarget",
            targetId=self.ask("Target.createTarget", url="about:blank")["targetId"],
            flatten=True,
        )
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Returns the answer to a command."""
        self._count += 1
        os.write(
            self._write,
            json.dumps({"id": self._count, "method": method, "params": params, **self._session}).encode() + b"\0",
        )
        while (answer := self._next()).get("id") != self._count:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, file: Path, *, width: int) -> None:
        """Loads a file in a window so wide, as a phone or a desk has it."""
        self.events.clear()
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
                 mobile=width < 600)  # fmt: skip
        self.ask("Page.navigate", url=file.as_uri())
        while not self.sent("Page.loadEventFired"):
            self.events.append(self._next())

    def value(self, script: str) -> Any:
        """Returns what an expression gives in the page."""
        return self.ask("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def press(self, key: str) -> None:
        """Presses and releases Tab, Enter or a space."""
        code, text = {"Tab": (9, ""), "Enter": (13, "\r"), " ": (32, " ")}[key]
        event = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": code}
        self.ask("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **event)

    def sent(self, *methods: str) -> list[dict[str, Any]]:
        """Returns the parameters of all events of these methods since the page was opened."""
        return [event["params"] for event in self.events if event.get("method") in methods]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._read], [], [], 60)[0], "the browser has said nothing for a minute"
            self._rest += os.read(self._read, 1 << 16)
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


# Elements whose content is wider than they are: it scrolls sideways, or is cut. A heading that only a screen reader has
# is one pixel wide.
OVERFLOWING = """(() => {
  const name = e => `${e.tagName} ${e.className} ${e.textContent.slice(0, 60)}`, found = [];
  for (const e of document.querySelectorAll('html, body, body *:not(svg, svg *)'))
    if (e.clientWidth > 1 && e.scrollWidth > e.clientWidth + 1 && !e.closest('.stacked thead'))
      found.push(`${name(e)}: ${e.scrollWidth} in ${e.clientWidth}`);
  for (const e of document.querySelectorAll('svg.chart text')) {
    const inner = e.getBoundingClientRect(), outer = e.ownerSVGElement.getBoundingClientRect();
    if (outer.width && (inner.left < outer.left - 1 || inner.right > outer.right + 1 || inner.top < outer.top - 1 ||
        inner.bottom > outer.bottom + 1)) found.push(`${name(e)}: outside of its drawing`);
  }
  return found;
})()"""

# Words that a line ends in the middle of; what is marked as long may be broken, and code.
BROKEN_WORDS = """(() => {
  const found = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), range = new Range();
  while (texts.nextNode()) {
    const node = texts.currentNode, text = node.data;
    if (node.parentElement.closest('svg, pre, .long:is(td, th)')) continue;
    let line = null;
    for (let i = 0; i < text.length; i++) {
      range.setStart(node, i); range.setEnd(node, i + 1);
      const box = range.getBoundingClientRect();
      if (!box.height) continue;
      const may = /[\\s-]/.test(text[i - 1]) && !/\\de-$/.test(text.slice(0, i));
      if (line !== null && box.top > line + 2 && !may) found.push(text);
      line = box.top;
    }
  }
  return found;
})()"""

# Pairs of words in one drawing that lie on each other.
COLLIDING = """(() => {
  const found = [];
  for (const chart of document.querySelectorAll('svg.chart')) {
    const words = [...chart.querySelectorAll('text')].map(e => [e.textContent, e.getBoundingClientRect()]);
    words.forEach(([one, a], i) => words.slice(i + 1).forEach(([other, b]) => {
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 1 && high > 4) found.push(`${one} | ${other}`);
    }));
  }
  return found;
})()"""


@contextlib.contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    """Starts a browser with a new profile, and ends it."""
    (command_read, command_write), (answer_read, answer_write) = os.pipe(), os.pipe()
    # out of the way of 3 and 4, where the protocol expects them and the shell puts them
    theirs = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10) for descriptor in (command_read, answer_write)]
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}', "bash", PROGRAM, *FLAGS,
         f"--user-data-dir={profile}"],
        pass_fds=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    for descriptor in (command_read, answer_write, *theirs):
        os.close(descriptor)
    try:
        yield Browser(command_write, answer_read)
    finally:
        process.terminate()
        process.wait(timeout=30)
        os.close(command_write)
        os.close(answer_read)
