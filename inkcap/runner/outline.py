"""What a run would be, without running it: the memory plan, every automatic choice, and the table of ops."""

from dataclasses import replace

import torch

from inkcap.base.checkpoint import find_checkpoint, read_config
from inkcap.base.config import Choice, EngineConfig
from inkcap.base.formats import Numerics
from inkcap.models.families import find_entry
from inkcap.models.registry import build, find_stored
from inkcap.ops.dispatch import bind, table
from inkcap.parallel.comm import Comm
from inkcap.runner.load import device_for, dtype_for, kv_dtype_for
from inkcap.runner.memory import available_memory, cpu_rest, gpu_rest, plan_for
from inkcap.weights.headers import Headers


def outline(config: EngineConfig) -> str:
    """The memory plan of one rank, and what was chosen for it. Reads the checkpoint's headers, not its weights.

    On a GPU the largest step is measured at start, so the plan here is without it. Raises SetupError as a start does.
    """
    device = device_for(config, 0)
    config = replace(config, sched=config.sched.on(device.type))
    dtype = dtype_for(config, device)
    directory = find_checkpoint(config.model.path, revision=config.model.revision, download=config.model.download)
    declared = read_config(directory)
    entry = find_entry(declared)
    text, numerics = entry.generation.read(declared), Numerics(config.model.numerics)
    stored = find_stored(Headers(directory), declared, text.num_hidden_layers, numerics)
    kv_dtype = kv_dtype_for(config, dtype)
    model = build(entry, text, Comm.outline(config.parallel.tp), dtype, torch.device("meta"), stored, kv_dtype)
    formats = sorted({form for layer in stored.values() for form in (layer.w13, layer.w2)})
    weight_bytes = sum(slot.target.numel() * slot.target.element_size() for slot in model.slots().values())
    choices = [
        Choice("model", directory, f"{entry.architecture}, {text.num_hidden_layers} layers"),
        Choice("device", device, "asked for" if config.model.device != "auto" else "found on this machine"),
        Choice(
            "dtype", str(dtype).removeprefix("torch."), "asked for" if config.model.dtype != "auto" else str(device)
        ),
        Choice("weights", f"{weight_bytes / 2**30:.2f} GiB", f"a rank of {config.parallel.tp}, as they are stored"),
        Choice("step", f"{config.sched.step_tokens:,} tokens", f"of which {config.sched.chunk:,} of one sequence"),
        Choice(
            "cache dtype",
            str(kv_dtype or dtype).removeprefix("torch."),
            "the model's" if config.cache.dtype == "auto" else "asked for",
        ),
        Choice("numerics", numerics, f"of experts stored in {', '.join(formats)}"),
    ]
    if config.cache.memory_bytes is not None:
        budget_bytes, reason = config.cache.memory_bytes, "asked for"
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allowed = config.cache.gpu_memory_bytes or int(total * config.cache.gpu_utilization)
        budget_bytes, reason = gpu_rest(allowed - weight_bytes, total, free - weight_bytes, 0), "what the GPU leaves"
    else:
        budget_bytes = cpu_rest(available_memory() - weight_bytes * config.parallel.tp, config.parallel.tp)
        reason = "a share of free memory"
    choices.append(Choice("cache", f"{budget_bytes / 2**30:.2f} GiB", reason))
    return "\n".join([*map(str, choices), "", str(plan_for(config, model, budget_bytes))])


def op_table(config: EngineConfig) -> str:
    """Each op, the implementation in use on this machine, and all it has. Raises NoSuchOp."""
    device = device_for(config, 0)
    bind(device, config.ops, deterministic=config.model.deterministic)
    rows = [("op", f"on {device}", "implementations"), *((name, used, ", ".join(all_)) for name, used, all_ in table())]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{name:<{widths[0]}}  {used:<{widths[1]}}  {names}" for name, used, names in rows)
