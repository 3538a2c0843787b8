"""How many bytes of state a rank may keep, and what that becomes."""

import gc
from itertools import pairwise
from pathlib import Path

import torch

from inkcap.base.config import EngineConfig
from inkcap.base.errors import NotEnoughMemory
from inkcap.base.log import logger
from inkcap.cache.plan import Load, MemoryPlan, groups_of, plan_memory
from inkcap.models.base import Model
from inkcap.ops.ahead import compiled_ahead
from inkcap.parallel.comm import Comm
from inkcap.runner.trial import batch_of

CPU_SHARE = 0.4  # of the memory that is free once the weights are loaded; the rest is for steps and other programs
# Bytes of a GPU beside weights, the largest step and the cache: row table (5 bytes a row and token of the longest
# sequence), compiled kernels, captured steps (24 layers, H200, 2026-11-29: 72 of decode for up to 64 rows
# 100 MiB; 20 of decode for up to 9 rows 56 MiB, with 18 mixed ones 164 MiB).
GPU_RESERVE = 1 << 30
SLACK = 1.1  # on the measured peak of a step: allocations of other sizes leave gaps


def plan_for(config: EngineConfig, model: Model, budget_bytes: int) -> MemoryPlan:
    """The cache of `model` within `budget_bytes` a rank.

    Raises NotEnoughMemory if no row could run, or not the longest sequence that the configuration asks for.
    """
    load = Load(
        rows=config.sched.rows,
        step_tokens=config.sched.step_tokens,
        chunk=config.sched.chunk,
        keep_every=config.cache.keep_every,
        prefix=config.cache.prefix,
    )
    most = min(model.max_length, config.model.max_length or model.max_length)
    plan = plan_memory(groups_of(model.states), budget_bytes, load, max_length=most)
    if config.model.max_length is not None and plan.longest < most:
        raise NotEnoughMemory(
            f"a sequence of model.max_length = {most} tokens does not fit the cache, which holds {plan.longest} tokens "
            f"in {budget_bytes / 2**20:.1f} MiB. Lower model.max_length or raise cache.memory_bytes."
        )
    return plan


def budget(config: EngineConfig, comm: Comm, device: torch.device, step_bytes: int = 0) -> int:
    """Bytes of state this rank may keep; the same on every rank of `comm`, all of which call this together.

    On a GPU what the largest step takes, `step_bytes`, is left free beside it. Raises NotEnoughMemory when weights and
    that step leave nothing.
    """
    cache = config.cache
    if cache.memory_bytes is not None:
        own = cache.memory_bytes
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allowed = int(total * cache.gpu_utilization) if cache.gpu_memory_bytes is None else cache.gpu_memory_bytes
        own = gpu_rest(allowed, total, free, step_bytes)
        logger.info(
            "GPU memory, GiB: %.1f may be used of %.1f; weights and others %.1f, largest step %.1f, cache up to %.1f",
            *(part / 2**30 for part in (allowed, total, total - free, step_bytes, own)),
        )
    else:
        own = cpu_rest(available_memory(), comm.size)
    return int(comm.all_gather(torch.tensor([own], device=device)).min())


def cpu_rest(available: int, ranks: int) -> int:
    """Bytes of cache for each of the `ranks` of a host with `available` bytes left once their weights are loaded."""
    return int(max(0, available) * CPU_SHARE) // ranks


def gpu_rest(allowed: int, total: int, free: int, step_bytes: int) -> int:
    """Bytes that `allowed` of a GPU leave for the cache, when `total - free` are taken. Raises NotEnoughMemory."""
    rest = min(allowed - (total - free), free) - step_bytes - GPU_RESERVE
    if rest <= 0:
        raise NotEnoughMemory(
            f"of {allowed / 2**30:.1f} GiB that may be used of this GPU, {(total - free) / 2**30:.1f} GiB are taken by "
            f"weights and other programs, {step_bytes / 2**30:.1f} GiB by the largest step and "
            f"{GPU_RESERVE / 2**30:.1f} GiB by graphs, which leaves nothing for the cache. Raise cache.gpu_utilization "
            f"or cache.gpu_memory_bytes, lower sched.step_tokens, or use more ranks (parallel.tp)."
        )
    return rest


@torch.inference_mode()
def measure_step(config: EngineConfig, model: Model, device: torch.device) -> int:
    """Bytes that a step as large as any takes on a GPU: run with a cache of its own, but for our kernels, which are
    compiled and not launched. They allocate nothing, and weights need not be there yet.
    """
    gc.collect()  # what an earlier engine left would go in the middle, and its room be taken for free
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    most, width = config.sched.step_tokens, config.sched.chunk
    edges = [*range(0, most, width), most]
    spans = tuple((a, b, row, 0) for row, (a, b) in enumerate(pairwise(edges)))
    batch = batch_of(model, spans, min(most, config.sched.rows), device)
    own = torch.cuda.memory_allocated(device) - before
    with compiled_ahead(device):
        logits = model.head(model.forward(batch)[batch.sampled])
        logits.clone().log_softmax(1)  # log-probabilities, for which all rows may ask
    peak = torch.cuda.max_memory_allocated(device) - before - own
    del batch, logits
    torch.cuda.empty_cache()
    return int(peak * SLACK)


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
