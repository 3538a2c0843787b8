"""How many bytes of state a rank may keep, and what that becomes."""

from pathlib import Path

import torch

from inkcap.base.config import EngineConfig
from inkcap.base.errors import NotEnoughMemory
from inkcap.cache.plan import Load, MemoryPlan, groups_of, plan_memory
from inkcap.models.base import Model
from inkcap.parallel.comm import Comm

CPU_SHARE = 0.4  # of the memory that is free once the weights are loaded; the rest is for steps and other programs
GPU_SHARE = 0.8  # likewise; what is left holds the activations of the largest step


def plan_for(config: EngineConfig, model: Model, budget_bytes: int) -> MemoryPlan:
    """Blocks for `model` within `budget_bytes` a rank.

    Raises NotEnoughMemory if running rows do not fit, or not the longest sequence that the configuration asks for.
    """
    load = Load(
        rows=config.sched.rows,
        step_tokens=config.sched.step_tokens,
        chunk=config.sched.chunk,
        keep_every=config.cache.keep_every,
    )
    most = min(model.max_length, config.model.max_length or model.max_length)
    plan = plan_memory(groups_of(model.states), budget_bytes, load, max_length=most, prefix=config.cache.prefix)
    if config.model.max_length is not None and plan.longest < most:
        raise NotEnoughMemory(
            f"a sequence of model.max_length = {most} tokens does not fit the cache, which holds {plan.longest} tokens "
            f"in {budget_bytes / 2**20:.1f} MiB. Lower model.max_length or raise cache.memory_bytes."
        )
    return plan


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
