"""Which backend serves: the first that can, or an error that says why none."""

from __future__ import annotations

import os

import torch

from paceline.backends import onednn
from paceline.backends.base import Backend
from paceline.backends.torch_ref import TorchBackend
from paceline.config import RuntimeConfig
from paceline.errors import BackendUnavailableError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def select_backend(config: RuntimeConfig) -> Backend:
    """The backend for ``config``; PACELINE_BACKEND fills in where it says auto.

    Raises:
        BackendUnavailableError: the backend or device asked for is not there.
    """
    name = config.backend if config.backend != "auto" else os.environ.get("PACELINE_BACKEND", "auto")
    if name not in ("auto", "torch"):
        raise BackendUnavailableError(
            f"backend {name!r} is not part of this build; use --backend torch (it runs on every torch device)"
        )
    device = _device(config.device)
    dtype = _dtype(config.dtype, device)
    if name == "auto" and device.type == "cpu" and dtype == torch.float32 and onednn.is_available():
        return onednn.PackedTorchBackend(device, dtype)
    return TorchBackend(device, dtype)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise BackendUnavailableError(f"device {name!r} cannot be used: {reason}; try --device cpu") from None
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    # fp32 on the CPU because there the greedy text must not depend on how many rows a pass verifies.
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _DTYPES[name]
