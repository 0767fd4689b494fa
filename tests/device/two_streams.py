"""The scene of most tests of the recording device: a tensor and two streams."""

import recording_device as recording
import torch

__all__ = ["BYTES", "new", "only"]

BYTES = 4 * 1000
"""Size of the tensor."""


def new(device="recording:0"):
    """A tensor and two streams that may be in use when it is freed."""
    recording.clear()
    tensor = torch.zeros(1000, device=device)
    a, b = torch.Stream(device=device), torch.Stream(device=device)
    tensor.record_stream(a)
    tensor.record_stream(b)
    torch.recording.synchronize(device)
    return tensor, a, b


def only(kind):
    """The one violation there is."""
    found = recording.violations()
    assert [violation.kind for violation in found] == [kind], found
    recording.clear()
    return found[0]
