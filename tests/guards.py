"""Zones around every tensor that is made, to find writes beyond its ends."""

import pytest
import torch

PAD = 4096  # bytes on either side
MADE_BY = ((torch, "empty"), (torch, "empty_like"), (torch, "zeros"), (torch.Tensor, "new_empty"))


class Guards:
    """Allocations of a test, with their zones."""

    def __init__(self) -> None:
        self.zones: list[tuple[torch.Tensor, int]] = []  # storage, bytes between its zones

    def around(self, make):
        """`make`, whose tensors lie between two zones; what it left uninitialised is NaN."""

        def made(*args, **kwargs):
            plain = make(*args, **kwargs)
            if kwargs.get("pin_memory") or plain.device.type == "meta" or not plain.is_contiguous():
                return plain
            size = plain.numel() * plain.element_size()
            storage = self.bytes_of(size + 2 * PAD, plain.device)
            self.zones.append((storage, size))
            between = storage[PAD : PAD + size].view(plain.dtype).view(plain.shape)
            return between.copy_(plain) if make is self.zeros else between

        return made

    def check(self) -> int:
        """How many allocations there were, none of which was left by a write."""
        for storage, size in self.zones:
            assert (storage[:PAD] == 0xFF).all(), f"something was written before a tensor of {size} bytes"
            assert (storage[PAD + size :] == 0xFF).all(), f"something was written behind a tensor of {size} bytes"
        return len(self.zones)

    bytes_of = staticmethod(lambda size, device, full=torch.full: full((size,), 0xFF, dtype=torch.uint8, device=device))
    zeros = staticmethod(torch.zeros)


@pytest.fixture
def guards(monkeypatch):
    """Puts zones around what the test makes from here on."""
    made = Guards()
    for owner, name in MADE_BY:
        monkeypatch.setattr(owner, name, made.around(getattr(owner, name)))
    return made
