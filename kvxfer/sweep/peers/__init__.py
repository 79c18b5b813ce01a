"""What people use today, moving the pages of a sweep beside kvxfer: one file a library.

A library is imported in its own file alone, inside a function, and runs in processes of its own:
its threads and hooks are no part of kvxfer's rows, nor is its end the end of the sweep.
"""

from kvxfer.sweep.peers.registry import PEERS

__all__ = ["PEERS"]
