"""How many bytes of state a rank may keep."""

from dataclasses import dataclass
from pathlib import Path

import torch

from inkcap.base.config import EngineConfig
from inkcap.cache.arena import plane_bytes
from inkcap.cache.group import CacheGroup
from inkcap.models.base import Model
from inkcap.parallel.comm import Comm

CPU_SHARE = 0.4  # of the memory that is free once the weights are loaded; the rest is for steps and other programs
GPU_SHARE = 0.8  # likewise; what is left holds the activations of the largest step


@dataclass(frozen=True)
class MemoryPlan:
    """Cache groups of a model on one rank, and the blocks each gets."""

    groups: list[CacheGroup]
    blocks: dict[str, int]  # block 0 included
    max_length: int  # tokens a sequence may have


def plan_memory(config: EngineConfig, model: Model, comm: Comm, device: torch.device) -> MemoryPlan:
    """Divide the rank's budget among the model's groups."""
    groups = []
    for name in dict.fromkeys(state.group for state in model.states):
        members = [state for state in model.states if state.group == name]
        size = sum(plane_bytes(plane, state.block) for state in members for plane in state.planes)
        groups.append(CacheGroup(name, members[0].block, size, members[0].window, members[0].reads_own_step))
    share = budget(config, comm, device) // len(groups)
    blocks = {group.name: share // group.block_bytes for group in groups}
    return MemoryPlan(groups, blocks, min(model.max_length, config.model.max_length or model.max_length))


def budget(config: EngineConfig, comm: Comm, device: torch.device) -> int:
    """Bytes of state this rank may keep; the same on every rank of `comm`, all of which call this together."""
    if config.cache.memory_bytes is not None:
        own = config.cache.memory_bytes
    elif device.type == "cuda":
        own = int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE)
    else:
        own = int(available_memory() * CPU_SHARE) // comm.size  # the ranks share this host
    return int(comm.all_gather(torch.tensor([own], device=device)).min())


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes this process can still allocate: what the kernel calls available, or the container's limit if less."""
    facts = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    available = int(facts["MemAvailable"].split()[0]) * 1024
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.exists() and used.exists() and (most := limit.read_text().strip()) != "max":
        kept = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        held = int(used.read_text()) - int(kept["inactive_file"])  # file pages are given back when memory runs short
        available = min(available, max(0, int(most) - held))
    return available
