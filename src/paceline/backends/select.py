"""Which backend serves: the first that can, or an error that says why none."""

from __future__ import annotations

import os

import torch

from paceline.backends import cpu, onednn
from paceline.backends.base import Backend
from paceline.backends.torch_ref import TorchBackend
from paceline.config import RuntimeConfig
from paceline.errors import BackendUnavailableError, InvalidParameterError

_TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def select_backend(config: RuntimeConfig) -> Backend:
    """The backend for ``config``; PACELINE_BACKEND fills in where it says auto.

    On a CPU that is the native one, unless fp32 is asked for, which torch computes.

    Raises:
        BackendUnavailableError: the backend, device or dtype asked for is not there.
        InvalidParameterError: PACELINE_NUM_THREADS is not a number.
    """
    name = config.backend if config.backend != "auto" else os.environ.get("PACELINE_BACKEND", "auto")
    device = find_device(config.device)
    if name not in ("auto", "torch", "cpu"):
        raise BackendUnavailableError(
            f"backend {name!r} is not part of this build; use --backend torch (it runs on every torch device)"
        )
    if name == "cpu" and (device.type != "cpu" or config.dtype == "fp32"):
        raise BackendUnavailableError(
            "backend 'cpu' computes on the CPU in bf16, int8 or int4; use --backend torch for other devices and fp32"
        )
    if name != "torch" and device.type == "cpu" and config.dtype != "fp32":
        if cpu.is_available():
            return cpu.CpuBackend(
                num_threads(config), config.dtype, "bf16" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
            )
        if name == "cpu":
            raise BackendUnavailableError(
                "backend 'cpu' needs the package's kernels, which are built with a C++ compiler; install one and "
                "reinstall, or use --backend torch"
            )
        cpu.warn_unavailable()
    if config.kv_cache_dtype != "auto":
        raise BackendUnavailableError(
            f"a K/V cache in {config.kv_cache_dtype} needs the CPU kernels; with torch leave --kv-cache-dtype at auto"
        )
    dtype = _torch_dtype(config.dtype, device)
    if name == "auto" and device.type == "cpu" and dtype == torch.float32 and onednn.is_available():
        return onednn.PackedTorchBackend(device, dtype)
    return TorchBackend(device, dtype)


def num_threads(config: RuntimeConfig) -> int:
    """Threads to compute with: as configured, as PACELINE_NUM_THREADS says, or one per core this process may use.

    Raises:
        InvalidParameterError: PACELINE_NUM_THREADS is not a number.
    """
    if config.num_threads is not None:
        return config.num_threads
    text = os.environ.get("PACELINE_NUM_THREADS")
    if not text:
        return torch.get_num_threads()
    if not text.isdecimal() or int(text) < 1:
        raise InvalidParameterError(f"PACELINE_NUM_THREADS must be a whole number of 1 or more, got {text!r}")
    return int(text)


def find_device(name: str) -> torch.device:
    """The torch device of this name; "auto" is a GPU if there is one.

    Raises:
        BackendUnavailableError: it cannot be used here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise BackendUnavailableError(f"device {name!r} cannot be used: {reason}; try --device cpu") from None
    return device


def _torch_dtype(name: str, device: torch.device) -> torch.dtype:
    # fp32 on the CPU because there the greedy text must not depend on how many rows a pass verifies.
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in _TORCH_DTYPES:
        raise BackendUnavailableError(f"dtype {name} needs the CPU backend; with torch use --dtype fp32 or bf16")
    return _TORCH_DTYPES[name]
