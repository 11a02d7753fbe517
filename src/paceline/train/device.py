"""Where training computes."""

from __future__ import annotations

import torch

from paceline.backends.select import find_device


def prepare_device(name: str, num_threads: int | None) -> torch.device:
    """The device to train on, by default a GPU if there is one; sets the process's number of threads if one is given.

    Raises:
        BackendUnavailableError: the device is not there.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    return find_device(name)
