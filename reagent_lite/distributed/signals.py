"""Signals that ask a run to end: a process that trains saves, a launcher passes them on to its workers."""

import signal

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP)
"""What Kubernetes and most schedulers send, Ctrl-C, what Slurm is told to send, and what a lost terminal sends."""


def heeded() -> tuple[signal.Signals, ...]:
    """Returns them; SIGHUP only where it is not ignored: a run under nohup is to outlive its terminal."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in SIGNALS if not (ignored and number == signal.SIGHUP))
