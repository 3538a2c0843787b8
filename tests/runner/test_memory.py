"""What a rank takes for free memory."""

import torch

from inkcap.base.config import CacheConfig, EngineConfig, ModelConfig
from inkcap.parallel.comm import Comm
from inkcap.runner.memory import CPU_SHARE, available_memory, budget


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
