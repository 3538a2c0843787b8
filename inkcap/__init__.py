"""inkcap serves Thinking Machines Lab's Inkling models. `LLM` is imported on first use: this stays torch-free."""

from typing import TYPE_CHECKING

from inkcap.base.config import EngineConfig
from inkcap.base.request import SamplingParams

if TYPE_CHECKING:
    from inkcap.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "SamplingParams"]


def __getattr__(name: str) -> object:
    if name == "LLM":
        from inkcap.llm import LLM

        return LLM
    raise AttributeError(f"module 'inkcap' has no attribute {name!r}")
