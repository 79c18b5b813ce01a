"""Where a sweep was run: what a reader needs to judge its figures."""

import os
import platform
from datetime import datetime, timezone
from pathlib import Path

from kvxfer import _core
from kvxfer.transport.topology import driver_version


def environment() -> dict[str, str]:
    """Names and versions, all text. Holds no host name and no path."""
    build = _core.build_info()
    found = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "kvxfer": build.version,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_model(),
        "cpus": str(len(os.sched_getaffinity(0))),
        "compiler": build.compiler,
        "cuda": build.cuda_version if build.has_cuda else "not in this build",
    }
    devices = [_core.device_info(index) for index in range(_core.device_count())]
    if devices:
        found["driver"] = driver_version()
        found["gpus"] = ", ".join(device.name for device in devices)
    return found


def cpu_model() -> str:
    """The processor's name, or the architecture where /proc does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
        for line in text.splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()
