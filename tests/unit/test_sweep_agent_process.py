"""The process of an agent: signals that are not for it, and a parent that is gone."""

import os
import signal
import subprocess
import sys

import pytest

from kvxfer.errors import InvalidUsage
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
