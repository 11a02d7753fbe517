"""Which backend serves what."""

from __future__ import annotations

import pytest
import torch

from paceline import BackendUnavailableError
from paceline.backends import onednn
from paceline.backends.onednn import PackedTorchBackend
from paceline.backends.select import select_backend
from paceline.backends.torch_ref import TorchBackend
from paceline.config import RuntimeConfig


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_BACKEND", raising=False)


def test_cpu_serves_fp32_with_packed_weights() -> None:
    backend = select_backend(RuntimeConfig(device="cpu"))
    assert (backend.dtype, backend.device) == (torch.float32, torch.device("cpu"))
    assert type(backend) is (PackedTorchBackend if onednn.is_available() else TorchBackend)


@pytest.mark.parametrize(
    "config",
    [RuntimeConfig(device="cpu", backend="torch"), RuntimeConfig(device="cpu", dtype="bf16")],
    ids=["asked-for", "bf16"],
)
def test_the_reference_where_asked_for_or_not_fp32(config: RuntimeConfig) -> None:
    assert type(select_backend(config)) is TorchBackend


def test_the_reference_where_packing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "is_available", lambda: False)
    assert type(select_backend(RuntimeConfig(device="cpu"))) is TorchBackend


@pytest.mark.parametrize(
    ("dtype", "expected"), [("auto", torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_dtypes_on_the_cpu(dtype: str, expected: torch.dtype) -> None:
    assert select_backend(RuntimeConfig(device="cpu", dtype=dtype)).dtype == expected  # type: ignore[arg-type]


def test_the_environment_fills_in_where_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_BACKEND", "torch")
    assert type(select_backend(RuntimeConfig(device="cpu"))) is TorchBackend
    monkeypatch.setenv("PACELINE_BACKEND", "bogus")
    assert type(select_backend(RuntimeConfig(device="cpu", backend="torch"))) is TorchBackend
    with pytest.raises(BackendUnavailableError, match="'bogus' is not part of this build; use --backend torch"):
        select_backend(RuntimeConfig(device="cpu"))


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_backends_that_are_not_built(backend: str) -> None:
    with pytest.raises(BackendUnavailableError, match=f"'{backend}' is not part of this build"):
        select_backend(RuntimeConfig(backend=backend))  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["bogus", "cuda:99", "cpu:x", "", "meta:-1"])
def test_devices_that_are_not_there(device: str) -> None:
    with pytest.raises(BackendUnavailableError, match="try --device cpu") as error:
        select_backend(RuntimeConfig(device=device))
    assert "\n" not in str(error.value)
