"""Where a sweep was run: what a reader needs to judge its figures."""

import os
import platform
from datetime import datetime, timezone

from kvxfer import _core
from kvxfer.transport import tuned
from kvxfer.transport.topology import driver_version
from kvxfer.tuning import cpu_model


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
    found["tuning"] = _tuning()
    return found


def _tuning() -> str:
    loaded = tuned.in_use()
    if loaded.profile is not None:
        return f"profile of {loaded.profile.created}"
    return "refused" if loaded.problem else "defaults"
