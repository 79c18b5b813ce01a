"""What a node is, as read off it: the input of every check, and what a capture holds.

``None`` is "unknown" everywhere: not readable here, without root, or on this driver. Unknown is
never a fault. GPUs are numbered as NVML numbers them; a PCI address is ``dddd:bb:dd.f`` in lower
case. Rates are of one direction in 1e9 bytes a second.
"""

import re

import msgspec

_PCI = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?")


class NvLink(msgspec.Struct, frozen=True, kw_only=True):
    """One NVLink of a GPU.

    Attributes:
        index: as NVML counts.
        active: trained and up; None where the state is not told, or in no word that is known.
        gb_per_s: what it carries one way.
        remote: ``gpu``, ``switch`` or ``unknown``.
        remote_pci: the device at its other end.
        num_errors: replays, recoveries and CRC errors since the driver was loaded.
    """

    index: int
    active: bool | None
    gb_per_s: float | None = None
    remote: str = "unknown"
    remote_pci: str = ""
    num_errors: int | None = None


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """What a GPU says of the NVSwitch fabric that it is part of.

    Attributes:
        state: ``not supported``, ``not started``, ``in progress`` or ``completed``.
        status: ``success``, or the error that registration ended with; empty where not told.
        clique: GPUs of one clique reach each other.
        cluster: UUID of the NVLink domain; zeros where it is one node.
        health: ``healthy``, or all that is wrong with it in words (``unhealthy``, ``degraded in
            bandwidth``); empty where it is not told.
    """

    state: str
    status: str = "success"
    clique: int | None = None
    cluster: str = ""
    health: str = ""


class PcieLink(msgspec.Struct, frozen=True, kw_only=True):
    """A PCIe link: generation and lanes, now and at best. An idle GPU lowers its generation."""

    generation: int | None = None
    best_generation: int | None = None
    width: int | None = None
    best_width: int | None = None


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU.

    Attributes:
        index: as NVML counts.
        name: as NVML says.
        uuid: ``GPU-...``.
        pci: PCI address.
        cuda_index: as CUDA counts in this process; None where this process does not see it.
        numa_node: of its PCI slot.
        memory_bytes: of its own memory.
        mig: whether it is cut into instances.
        dmabuf: whether its memory can be exported as a dma-buf.
        row_remap_failed: a bad memory row could not be replaced.
        row_remap_pending: one will be at the next reset.
        slowdown: why its clocks are held down now, but for power limit and idleness; empty = no.
    """

    index: int
    name: str
    uuid: str = ""
    pci: str = ""
    cuda_index: int | None = None
    numa_node: int | None = None
    memory_bytes: int | None = None
    pcie: PcieLink = PcieLink()
    links: tuple[NvLink, ...] | None = None
    fabric: Fabric | None = None
    mig: bool | None = None
    dmabuf: bool | None = None
    row_remap_failed: bool | None = None
    row_remap_pending: bool | None = None
    slowdown: str | None = None

    @property
    def active_links(self) -> tuple[NvLink, ...]:
        """Links that are up."""
        return tuple(link for link in self.links or () if link.active)


class GpuPair(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver says of one GPU reaching another (an ordered pair).

    Attributes:
        src: NVML index of the GPU that reaches.
        dst: NVML index of the GPU that is reached.
        path: as ``nvidia-smi topo -m`` names it: ``NV18``, ``PIX``, ``PXB``, ``PHB``, ``NODE``,
            ``SYS``; empty = unknown.
        nvlink: P2P status over NVLink: ``ok``, or why not; None = unknown.
        read: P2P status of reads.
        write: P2P status of writes.
        cuda_access: what ``cudaDeviceCanAccessPeer`` answers.
    """

    src: int
    dst: int
    path: str = ""
    nvlink: str | None = None
    read: str | None = None
    write: str | None = None
    cuda_access: bool | None = None

    @property
    def num_nvlinks(self) -> int:
        """Links that the path names; 0 where it is none of NVLink."""
        digits = self.path.removeprefix("NV")
        return int(digits) if self.path.startswith("NV") and digits.isdecimal() else 0


class NicPort(msgspec.Struct, frozen=True, kw_only=True):
    """A port of an RDMA device: state ``active`` or another, rate in Gbit/s, link layer."""

    number: int
    state: str
    physical_state: str = ""
    gbit_per_s: float | None = None
    link_layer: str = ""


class Nic(msgspec.Struct, frozen=True, kw_only=True):
    """An RDMA device.

    Attributes:
        name: ``mlx5_0``.
        pci: PCI address of its (physical) function; empty where it has none.
        numa_node: of its slot.
        software: emulated by the kernel (siw, rxe): it says nothing of the hardware.
        ports: its ports.
        paths: NVML index of a GPU -> path to it, as in :class:`GpuPair`.
    """

    name: str
    pci: str = ""
    numa_node: int | None = None
    software: bool = False
    ports: tuple[NicPort, ...] = ()
    paths: dict[int, str] = {}

    @property
    def active(self) -> bool:
        """Whether a port is up."""
        return any(port.state == "active" for port in self.ports)

    @property
    def gbit_per_s(self) -> float:
        """Of all active ports."""
        return sum(port.gbit_per_s or 0.0 for port in self.ports if port.state == "active")


class NumaNode(msgspec.Struct, frozen=True, kw_only=True):
    """A NUMA node with CPUs: its CPUs, and those of them that this process may run on."""

    index: int
    cpus: tuple[int, ...]
    usable_cpus: tuple[int, ...] = ()


class Xid(msgspec.Struct, frozen=True, kw_only=True):
    """An error that the NVIDIA driver wrote to the kernel's log: of a GPU, or of a switch.

    Attributes:
        code: of NVIDIA's Xid catalogue, or an SXid.
        pci: of the device.
        text: the first line's words.
        of_switch: an SXid.
        instance: of a GPU that is cut, as the line names it: ``GPU-I:05``.
        nonfatal: the driver calls it so; False where it says nothing of that.
        links: NVLinks that its lines name.
    """

    code: int
    pci: str
    text: str
    of_switch: bool = False
    instance: str = ""
    nonfatal: bool = False
    links: tuple[int, ...] = ()


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """All but GPUs and NICs.

    Attributes:
        kernel: version.
        cpu: model.
        num_cpus: that this process may use.
        numa_nodes: with CPUs.
        gpu_pcis: NVIDIA GPUs on the PCI bus, the driver's or not; no virtual functions of them.
        num_expected_gpus: as the operator says; None = nothing was said.
        gpu_drivers: GPU on the bus -> kernel driver that it is bound to, empty = none; those that
            are not told are left out.
        nvml_reason: why NVML lists no GPU; empty where it lists some, or was not asked.
        nvswitch_pcis: NVIDIA bridges that are NVSwitches.
        driver: version of the loaded NVIDIA driver; empty = none is loaded.
        cuda_status: 0, or the error with which CUDA does not start.
        cuda_reason: the same in words.
        fabric_manager: version; empty = not installed.
        fabric_manager_running: whether its process is there.
        modules: loaded kernel modules that matter here.
        iommu: ``off``, ``passthrough`` or ``translated``.
        acs_ports: PCI bridges that redirect peer traffic (ACS); None without root.
        hypervisor: name, empty on bare metal.
        container: in one, or not.
        pid_namespace: inode of it, where it is not the host's.
        ipc_namespace: likewise.
        imex_channels: channels in ``/dev/nvidia-caps-imex-channels``; None = no such folder.
        xids: from the kernel's log; None where that is not readable.
        rdma_errno: errno with which GPU memory was refused by a NIC, where it was tried.
    """

    kernel: str = ""
    cpu: str = ""
    num_cpus: int | None = None
    numa_nodes: tuple[NumaNode, ...] = ()
    gpu_pcis: tuple[str, ...] | None = None
    num_expected_gpus: int | None = None
    gpu_drivers: dict[str, str] = {}
    nvml_reason: str = ""
    nvswitch_pcis: tuple[str, ...] | None = None
    driver: str | None = None
    cuda_status: int | None = None
    cuda_reason: str = ""
    fabric_manager: str | None = None
    fabric_manager_running: bool | None = None
    modules: tuple[str, ...] | None = None
    iommu: str | None = None
    acs_ports: tuple[str, ...] | None = None
    hypervisor: str | None = None
    container: bool | None = None
    pid_namespace: str | None = None
    ipc_namespace: str | None = None
    imex_channels: int | None = None
    xids: tuple[Xid, ...] | None = None
    rdma_errno: int | None = None


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """A node.

    Attributes:
        gpus: in NVML's order; None where nothing could tell.
        pairs: all ordered pairs of GPUs that something is known of.
        nics: RDMA devices.
        host: the rest.
        sources: what was read of which source, in words.
    """

    gpus: tuple[Gpu, ...] | None = None
    pairs: tuple[GpuPair, ...] = ()
    nics: tuple[Nic, ...] = ()
    host: Host = Host()
    sources: dict[str, str] = {}

    def gpu(self, index: int) -> Gpu:
        """The GPU of an NVML index; KeyError where there is none."""
        for gpu in self.gpus or ():
            if gpu.index == index:
                return gpu
        raise KeyError(index)

    def pair(self, src: int, dst: int) -> GpuPair:
        """What is known of a pair; an empty one where nothing is."""
        for pair in self.pairs:
            if (pair.src, pair.dst) == (src, dst):
                return pair
        return GpuPair(src=src, dst=dst)

    @property
    def hardware_nics(self) -> tuple[Nic, ...]:
        """RDMA devices that are not emulated."""
        return tuple(nic for nic in self.nics if not nic.software)


def format_pci(text: str) -> str:
    """A PCI address of any spelling (``00000000:1A:00.0``, ``1a:00.0``) as ``0000:1a:00.0``.

    What is none comes back as it is, in lower case.
    """
    text = text.strip().lower()
    match = _PCI.fullmatch(text)
    if match is None:
        return text
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function or '0'}"
