"""Pinned host memory for the checkpoints of a training pass."""

from __future__ import annotations

import weakref

import torch


class HostStore:
    """Pinned host memory for one hidden state a layer, copied on a stream of its own.

    `max_bytes` caps it; a layer that does not fit stays on the card (`put` then returns False).
    """

    def __init__(self, device: torch.device, num_layers: int, max_bytes: int) -> None:
        self.device, self.num_layers, self.max_bytes = device, num_layers, max_bytes
        self.stream = torch.cuda.Stream(device)
        self.buffer: torch.Tensor | None = None
        self.fetched: dict[int, tuple[torch.Tensor, torch.cuda.Event]] = {}
        self.kept = 0
        """layers that found room"""

    def put(self, index: int, x: torch.Tensor) -> bool:
        if index == 0:
            self._reserve(x)
        if index >= self.kept:
            return False
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            self._slot(index).copy_(x, non_blocking=True)
        x.record_stream(self.stream)  # its memory may be reused only when the copy is done
        return True

    def get(self, index: int) -> torch.Tensor:
        """The state of layer `index`; the one below it is fetched meanwhile."""
        if index not in self.fetched:
            self._fetch(index)
        x, ready = self.fetched.pop(index)
        if index:
            self._fetch(index - 1)
        torch.cuda.current_stream(self.device).wait_event(ready)
        return x

    def _fetch(self, index: int) -> None:
        x = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            x.copy_(self._slot(index), non_blocking=True)
            ready = torch.cuda.Event()
            ready.record(self.stream)
        self.fetched[index] = x, ready

    def _slot(self, index: int) -> torch.Tensor:
        return self.buffer[index * self.bytes : (index + 1) * self.bytes].view(self.dtype).view(self.shape)

    def _reserve(self, x: torch.Tensor) -> None:
        self.fetched.clear()  # of a pass that was interrupted
        self.shape, self.dtype, self.bytes = x.shape, x.dtype, x.numel() * x.element_size()
        self.kept = min(self.num_layers, self.max_bytes // self.bytes)
        needed = self.kept * self.bytes
        if self.buffer is None or self.buffer.numel() < needed:
            self.close()
            # Registered by hand: torch's pinned allocator rounds up to a power of two.
            self.buffer = torch.empty(needed, dtype=torch.uint8)
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self.buffer.data_ptr(), needed, 0))
            self._unpin = weakref.finalize(self, unpin, self.buffer, self.stream)

    def close(self) -> None:
        """Unpin and free."""
        if self.buffer is not None:
            self._unpin()
        self.buffer = None


def unpin(buffer: torch.Tensor, stream: torch.cuda.Stream) -> None:
    # Memory that is freed while registered leaves the driver with a mapping that fails some later, innocent call.
    stream.synchronize()
    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
