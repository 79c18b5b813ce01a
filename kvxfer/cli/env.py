"""kvxfer env: versions, GPUs, which transports work here, and what RDMA would need."""

import argparse
from dataclasses import asdict

import msgspec
from rich import box
from rich.table import Table

from kvxfer import _core
from kvxfer.cli.json_option import add_json, print_result, require_target
from kvxfer.diagnose.inventory import facts_of, read_live
from kvxfer.diagnose.rdma import preconditions, read_process
from kvxfer.sweep.environment import environment
from kvxfer.transport import available_transports, tuned
from kvxfer.units import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print what is here."""
    require_target(args.json)
    facts = environment()
    facts["cuda architectures"] = _core.build_info().cuda_architectures or "none"
    facts["tuning"] = tuned.in_use().text
    transports = available_transports()
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    for name, value in facts.items():
        table.add_row(name, value)
    for index in range(_core.device_count()):
        table.add_row(f"GPU {index}", _describe(_core.device_info(index)))
    for name, found in transports.items():
        table.add_row(
            f"transport {name}", "available" if found.available else f"not here: {found.reason}"
        )
    needs = preconditions(facts_of(read_live()), read_process())
    for need in needs:
        table.add_row(need.name, f"{need.found}\n→ {need.remedy}" if need.remedy else need.found)
    document = {
        "environment": facts,
        "transports": {
            name: {"available": found.available, "reason": found.reason}
            for name, found in transports.items()
        },
        "rdma": [asdict(need) for need in needs],
    }
    print_result(
        args.json,
        lambda: msgspec.json.encode(document).decode(),
        lambda console: console.print(table),
    )
    return 0


def _describe(info: _core.DeviceInfo) -> str:
    return (
        f"{info.name}, sm_{info.compute_major}{info.compute_minor}, {info.num_sms} SMs, "
        f"{format_bytes(info.memory_bytes)}, PCI {info.pci_bus_id}"
    )
