"""The program of a rank's agent: it serves until its standard input closes."""

import os
import sys
from contextlib import suppress

from kvxfer.sweep.agent import serve_agent
from kvxfer.sweep.ranks.agent import RankAgent

_STDOUT = 1


def main() -> int:
    """Serve until standard input closes."""
    agent = RankAgent()
    with serve_agent(agent.handlers) as server:
        # Past sys.stdout, which would complain again at the end where the parent is gone.
        with suppress(BrokenPipeError):
            os.write(_STDOUT, f"{server.addresses['sweep']}\n".encode())
        sys.stdin.buffer.read()
    agent.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
