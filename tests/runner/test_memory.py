"""What a rank takes for free memory."""

from pathlib import Path

import pytest
import torch

from inkcap.base.config import CacheConfig, EngineConfig, ModelConfig
from inkcap.base.errors import ConfigInvalid, NotEnoughMemory
from inkcap.parallel.comm import Comm
from inkcap.runner.load import check_generation, told_what_fits
from inkcap.runner.memory import CPU_SHARE, GPU_RESERVE, available_memory, budget, gpu_rest


def host(tmp_path, available_kib: int, limit: str | None, used: int = 0, files: int = 0):
    (tmp_path / "meminfo").write_text(f"MemTotal:  99999 kB\nMemAvailable:   {available_kib} kB\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")
        (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {files}\n")
    return tmp_path, tmp_path


def test_without_a_limit_it_is_what_the_kernel_says(tmp_path):
    assert available_memory(*host(tmp_path, 1000, None)) == 1000 * 1024
    assert available_memory(*host(tmp_path, 1000, "max")) == 1000 * 1024


def test_a_containers_limit_counts_less_what_it_holds_and_cannot_give_back(tmp_path):
    assert available_memory(*host(tmp_path, 10_000, "500000", used=300_000, files=100_000)) == 300_000
    assert available_memory(*host(tmp_path, 10_000, "500000", used=700_000)) == 0
    assert available_memory(*host(tmp_path, 10, "500000", used=0)) == 10 * 1024


def test_a_configured_budget_is_taken_as_it_is():
    config = EngineConfig(model=ModelConfig(path="x"), cache=CacheConfig(memory_bytes=12345))
    assert budget(config, Comm.alone(), torch.device("cpu")) == 12345


def test_a_chosen_budget_is_a_share_of_what_is_free(monkeypatch):
    monkeypatch.setattr("inkcap.runner.memory.available_memory", lambda: 1 << 30)
    config = EngineConfig(model=ModelConfig(path="x"))
    assert budget(config, Comm.alone(), torch.device("cpu")) == int(CPU_SHARE * (1 << 30))


def test_a_gpus_rest_is_what_weights_and_the_largest_step_leave():
    assert gpu_rest(allowed=90 << 30, total=100 << 30, free=70 << 30, step_bytes=5 << 30) == (55 << 30) - GPU_RESERVE
    # never more than is free
    assert gpu_rest(allowed=200 << 30, total=100 << 30, free=10 << 30, step_bytes=0) == (10 << 30) - GPU_RESERVE


def test_a_gpu_without_room_names_what_fills_it_and_what_helps():
    with pytest.raises(NotEnoughMemory, match=r"30\.0 GiB are taken.* 9\.5 GiB by the largest step.*gpu_utilization"):
        gpu_rest(allowed=40 << 30, total=100 << 30, free=70 << 30, step_bytes=int(9.5 * 2**30))


def test_weights_that_do_not_fit_a_gpu_name_it_and_what_helps(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 << 30, 80 << 30))
    with (
        pytest.raises(NotEnoughMemory, match=r"rank 0 of 1 .* cuda:3, which has 80\.0 GiB.*inspect models/m`.*tp"),
        told_what_fits(Path("models/m"), Comm.alone(), torch.device("cuda", 3)),
    ):
        raise torch.OutOfMemoryError("no room")


def test_gpus_before_ampere_are_refused():
    with pytest.raises(ConfigInvalid, match=r"Tesla T4 has compute capability 7\.5.*8\.0 \(Ampere\).*cpu"):
        check_generation(7, 5, "Tesla T4")
    check_generation(8, 0, "A100")
    check_generation(9, 0, "H200")
