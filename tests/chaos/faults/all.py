"""All kinds: importing a module registers its kinds."""

from tests.chaos.faults import clock, disk, files, kills, limits, network
from tests.chaos.faults.registry import KINDS

__all__ = ["KINDS", "clock", "disk", "files", "kills", "limits", "network"]
