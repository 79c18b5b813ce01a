"""The program of a far-side agent: it serves until its standard input closes."""

import sys

from kvxfer.sweep.agent import Agent, serve_agent


def main() -> int:
    """Serve until standard input closes."""
    agent = Agent()
    with serve_agent(agent) as server:
        sys.stdout.write(server.addresses["sweep"] + "\n")
        sys.stdout.flush()
        sys.stdin.buffer.read()
    agent.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
