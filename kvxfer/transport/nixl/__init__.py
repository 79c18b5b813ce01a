"""`nixl`: peers over NIXL, by any of its plug-ins.

Long rows are written and read in place, a descriptor a row. Others are gathered by the paged copy
into a slot that NIXL knows, travel as one descriptor, and are scattered by the far side
(:mod:`kvxfer.transport.nixl.wire` lists the messages). A thread there checks every address of a
scatter or gather against the regions that are exported, has threads or its GPU copy, and completes
on the board itself. Slots of GPUs lie in their memory where that is reached directly, else in
pinned host memory (:mod:`kvxfer.transport.nixl.reach`).

NIXL trusts its peers: who holds an agent's metadata may write the regions that it names, and the
metadata is parsed by NIXL. It travels sealed by a hash, against damage, on the control plane, whose
key says who is admitted. With UCX and a loopback bind, the default, NIXL keeps to that device.
"""

from kvxfer.transport.nixl.transport import NixlTransport

__all__ = ["NixlTransport"]
