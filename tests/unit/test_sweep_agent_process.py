"""The process of an agent: signals that are not for it, and a parent that is gone."""

import os
import resource
import signal
import subprocess
import sys

import pytest

from kvxfer.errors import InvalidUsage, NotAvailable, PeerLost
from kvxfer.sweep import messages
from kvxfer.sweep.agent_process import AgentProcess

DEADLINE_S = 60.0


def test_sigint_is_not_heard_at_the_start_nor_later() -> None:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with AgentProcess(wait=False) as agent:
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == blocked  # of this process
        pid = agent._process.pid
        os.kill(pid, signal.SIGINT)
        agent.wait_ready()
        os.kill(pid, signal.SIGINT)
        assert agent.call(messages.Release()) == messages.Ready()


def test_a_process_that_is_not_ready_takes_no_message() -> None:
    with AgentProcess(wait=False) as agent, pytest.raises(InvalidUsage, match="is not ready"):
        agent.call(messages.Release())
    agent.close()


def test_the_end_of_a_child_names_a_low_limit_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    low = r"may open few files: RLIMIT_NOFILE is 20; raise it \(ulimit -n\)"
    with AgentProcess(wait=False) as early:
        os.kill(early._process.pid, signal.SIGKILL)  # at once, before it can be ready
        with AgentProcess() as late:
            os.kill(late._process.pid, signal.SIGKILL)
            monkeypatch.setattr(resource, "getrlimit", lambda what: (20, 4096))
            with pytest.raises(NotAvailable, match=rf"status -9 before it was ready; it {low}"):
                early.wait_ready()
            with pytest.raises(PeerLost, match=rf"status -9; it {low}"):
                late.call(messages.Release())
            monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 4096))
            with pytest.raises(PeerLost, match=r"status -9$"):
                late.require_alive()


def test_a_parent_that_is_gone_ends_it_without_a_word() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvxfer.sweep.agent_main"],
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=DEADLINE_S,
            cwd="/",
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
