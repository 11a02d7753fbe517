"""Where training computes."""

from __future__ import annotations

import torch

from paceline.errors import BackendUnavailableError


def prepare_device(name: str, num_threads: int | None) -> torch.device:
    """The device to train on, by default a GPU if there is one; sets the process's number of threads if one is given.

    Raises:
        BackendUnavailableError: the device is not there.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise BackendUnavailableError(
            f"device {name!r} cannot be used: {str(error).splitlines()[0]}; try --device cpu"
        ) from None
    return device
