"""From a configuration to a rank that is ready: device, threads, checkpoint, model, memory."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from inkcap.base.checkpoint import find_checkpoint, read_eos_ids
from inkcap.base.config import EngineConfig
from inkcap.base.errors import CheckpointMismatch, CheckpointUnreadable, ConfigInvalid, NotEnoughMemory
from inkcap.base.formats import Numerics
from inkcap.base.log import logger
from inkcap.base.matching import Compiler
from inkcap.base.sampling import token_rules
from inkcap.models.base import Model
from inkcap.models.registry import open_model
from inkcap.ops.ahead import know_compiler
from inkcap.parallel.comm import Comm
from inkcap.runner.worker import Worker
from inkcap.weights.kv_scales import read_kv_scales

OLDEST = (8, 0)  # compute capability
MEASURED = 9  # major number of the generation that kernels were tuned on
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def device_for(config: EngineConfig, rank: int) -> torch.device:
    """Where that rank of this host runs. Raises ConfigInvalid when there is no such GPU."""
    wanted, gpus = config.model.device, torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and gpus == 0):
        return torch.device("cpu")
    if rank >= gpus:
        raise ConfigInvalid(
            f"rank {rank} needs a GPU of its own, and this host has {gpus}; lower parallel.tp or set model.device = cpu"
        )
    check_generation(*torch.cuda.get_device_capability(rank), torch.cuda.get_device_name(rank))
    return torch.device("cuda", rank)


def check_generation(major: int, minor: int, name: str) -> None:
    """Refuse GPUs that no kernel here was written for, by compute capability. Raises ConfigInvalid."""
    if (major, minor) < OLDEST:
        raise ConfigInvalid(
            f"{name} has compute capability {major}.{minor}; inkcap needs {OLDEST[0]}.{OLDEST[1]} (Ampere) or newer. "
            f"Set model.device = cpu to run without it."
        )
    if major != MEASURED:
        logger.info("%s is not a Hopper GPU: kernels run, but were not tuned for it", name)


def dtype_for(config: EngineConfig, device: torch.device) -> torch.dtype:
    """The dtype of weights and activations."""
    if config.model.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[config.model.dtype]


def kv_dtype_for(config: EngineConfig, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype of cached keys and values; None where it is the model's, `dtype`.

    Raises ConfigInvalid when a BF16 cache is asked for and the model has another dtype, or scales without codes.
    """
    wanted = config.cache.dtype
    if wanted == "bf16" and dtype is not torch.bfloat16:
        raise ConfigInvalid(
            f"cache.dtype = bf16 needs a model in bfloat16, and this one runs in {str(dtype).removeprefix('torch.')}; "
            f"set model.dtype = bfloat16, or cache.dtype = auto or fp8"
        )
    if config.cache.scales is not None and not wanted.startswith("fp8"):
        raise ConfigInvalid(f"cache.scales needs cache.dtype = fp8; it is {wanted}")
    return torch.float8_e4m3fn if wanted.startswith("fp8") else None


def load_worker(config: EngineConfig, comm: Comm, *, progress: bool = True) -> Worker:
    """Load this rank's part of the configured checkpoint, and make room for its state.

    All ranks of `comm` load at the same time; give `progress` to one of them. Raises what base.errors lists under
    SetupError.
    """
    device = device_for(config, comm.rank)
    config = replace(config, sched=config.sched.on(device.type))
    if device.type == "cpu":
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(config.model.threads or max(1, cores // comm.size))
    directory = find_checkpoint(config.model.path, revision=config.model.revision, download=config.model.download)
    dtype = dtype_for(config, device)
    numerics = Numerics(config.model.numerics)
    kv_dtype = kv_dtype_for(config, dtype)
    with ThreadPoolExecutor(3) as beside:
        if device.type == "cuda":
            beside.submit(torch.empty, 1, device=device)  # the first use of a device takes a while
            beside.submit(know_compiler)
        with told_what_fits(directory, comm, device):
            model, read = open_model(
                directory,
                comm=comm,
                dtype=dtype,
                device=device,
                progress=progress,
                numerics=numerics,
                kv_dtype=kv_dtype,
            )
        reading = beside.submit(read)
        compiler = beside.submit(compiler_for, directory)

        def finish() -> None:
            reading.result()
            model.unpack()
            if kv_dtype is not None:
                choose_code_scales(config, model, progress)

        # A GPU's steps are prepared meanwhile: that needs no weights, but where steps have numbers of them built in.
        # What a CPU has left for the cache is known only behind it.
        early = device.type == "cuda" and numerics is not Numerics.REFERENCE
        if not early:
            finish()
        rules = token_rules(model.vocab_size, read_eos_ids(directory))
        worker = Worker(config, model, comm, device=device, dtype=dtype, rules=rules, compiler=compiler.result())
        if early:
            finish()
    return worker


def choose_code_scales(config: EngineConfig, model: Model, progress: bool) -> None:
    """Take the scales of cached codes that the configuration names, where it does, and say where they are from."""
    origin = "made of the weights, so that none can saturate"
    if config.cache.scales is not None:
        count = read_kv_scales(Path(config.cache.scales), model.code_slots())
        origin = f"{count} of {len(model.code_slots())} from {config.cache.scales}; numbers beyond them saturate"
    if progress:
        logger.info("keys and values are cached as E4M3, with a power of two a head: %s", origin)


@contextmanager
def told_what_fits(directory: Path, comm: Comm, device: torch.device) -> Iterator[None]:
    """A GPU that cannot hold this rank's weights, all of which are allocated first, becomes NotEnoughMemory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise NotEnoughMemory(
            f"the weights of rank {comm.rank} of {comm.size} do not fit {device}, which has {total / 2**30:.1f} GiB, "
            f"{free / 2**30:.1f} of them free once loading failed. `inkcap inspect {directory}` says what each number "
            f"of ranks (parallel.tp) needs and which GPUs hold it; a checkpoint with quantised experts needs less."
        ) from error


def compiler_for(directory: Path) -> Compiler | None:
    """What holds answers to rules; None where the checkpoint's vocabulary is not the one that rules are about."""
    try:
        return Compiler.load(directory)
    except (CheckpointUnreadable, CheckpointMismatch) as error:
        logger.info("answers cannot be held to rules (tools, JSON): %s", error)
        return None
