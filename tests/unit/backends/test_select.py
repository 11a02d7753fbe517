"""Which backend serves what."""

from __future__ import annotations

import pytest
import torch

from paceline import BackendUnavailableError
from paceline.backends import cpu, onednn
from paceline.backends.cpu import CpuBackend
from paceline.backends.onednn import PackedTorchBackend
from paceline.backends.select import select_backend
from paceline.backends.torch_ref import TorchBackend
from paceline.config import RuntimeConfig


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_BACKEND", raising=False)


def test_the_kernels_serve_the_cpu() -> None:
    backend = select_backend(RuntimeConfig(device="cpu"))
    assert type(backend) is CpuBackend
    assert type(select_backend(RuntimeConfig(backend="cpu", dtype="int4"))) is CpuBackend


def test_without_the_kernels_torch_serves_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "is_available", lambda: False)
    with pytest.warns(RuntimeWarning, match="without its CPU kernels"):
        assert isinstance(select_backend(RuntimeConfig(device="cpu")), TorchBackend)
    with pytest.raises(BackendUnavailableError, match="install one and reinstall"):
        select_backend(RuntimeConfig(backend="cpu"))


def test_fp32_is_served_with_packed_weights() -> None:
    backend = select_backend(RuntimeConfig(device="cpu", dtype="fp32"))
    assert (backend.dtype, backend.device) == (torch.float32, torch.device("cpu"))
    assert type(backend) is (PackedTorchBackend if onednn.is_available() else TorchBackend)


@pytest.mark.parametrize(
    "config",
    [RuntimeConfig(device="cpu", backend="torch"), RuntimeConfig(backend="torch", dtype="bf16")],
    ids=["fp32", "bf16"],
)
def test_the_reference_where_asked_for(config: RuntimeConfig) -> None:
    assert type(select_backend(config)) is TorchBackend


def test_the_reference_where_packing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "is_available", lambda: False)
    assert type(select_backend(RuntimeConfig(device="cpu", dtype="fp32"))) is TorchBackend


@pytest.mark.parametrize(
    ("dtype", "expected"), [("auto", torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_dtypes_of_torch_on_the_cpu(dtype: str, expected: torch.dtype) -> None:
    assert select_backend(RuntimeConfig(backend="torch", dtype=dtype)).dtype == expected  # type: ignore[arg-type]


def test_the_environment_fills_in_where_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_BACKEND", "torch")
    assert type(select_backend(RuntimeConfig(device="cpu"))) is TorchBackend
    monkeypatch.setenv("PACELINE_BACKEND", "bogus")
    assert type(select_backend(RuntimeConfig(device="cpu", backend="torch"))) is TorchBackend
    with pytest.raises(BackendUnavailableError, match="'bogus' is not part of this build; use --backend torch"):
        select_backend(RuntimeConfig(device="cpu"))


def test_a_backend_that_is_not_built() -> None:
    with pytest.raises(BackendUnavailableError, match="'cuda' is not part of this build"):
        select_backend(RuntimeConfig(backend="cuda"))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_torch_has_no_integer_weights(dtype: str) -> None:
    with pytest.raises(BackendUnavailableError, match="needs the CPU backend"):
        select_backend(RuntimeConfig(backend="torch", dtype=dtype))  # type: ignore[arg-type]


def test_torch_has_no_integer_keys_and_values() -> None:
    for config in (
        RuntimeConfig(backend="torch", kv_cache_dtype="int8"),
        RuntimeConfig(dtype="fp32", kv_cache_dtype="int8"),
    ):
        with pytest.raises(BackendUnavailableError, match="in int8 needs the CPU kernels"):
            select_backend(config)


def test_the_kernels_do_not_compute_fp32() -> None:
    with pytest.raises(BackendUnavailableError, match="use --backend torch for other devices and fp32"):
        select_backend(RuntimeConfig(backend="cpu", dtype="fp32"))


def test_an_instruction_set_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_ISA", "sve2")
    with pytest.raises(BackendUnavailableError, match=r"PACELINE_ISA=sve2: this processor offers .*portable"):
        select_backend(RuntimeConfig(backend="cpu"))


@pytest.mark.parametrize("device", ["bogus", "cuda:99", "cpu:x", "", "meta:-1"])
def test_devices_that_are_not_there(device: str) -> None:
    with pytest.raises(BackendUnavailableError, match="try --device cpu") as error:
        select_backend(RuntimeConfig(device=device))
    assert "\n" not in str(error.value)
