"""What this machine has. Nothing here imports PyTorch."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that can be had without swapping, also under a container's limit; 0 where the system does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pages = os.sysconf("SC_AVPHYS_PAGES") if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names else 0
        free = pages * os.sysconf("SC_PAGE_SIZE") if pages else 0
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        cached = next(int(line.split()[1]) for line in (_CGROUP / "memory.stat").read_text().splitlines()
                      if line.startswith("inactive_file "))  # given back before the limit is felt
    except (OSError, ValueError, StopIteration):  # no limit, or none that is told
        return free
    return min(free, max(0, limit - used + cached))
