"""What is said of the path between two GPUs where NVML does not help."""

from types import SimpleNamespace

import pynvml
import pytest

from kvxfer.transport import topology


def test_a_gpu_that_nvml_does_not_know_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(bus_id: bytes) -> object:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    core = SimpleNamespace(device_info=lambda index: SimpleNamespace(pci_bus_id=f"{index}"))
    monkeypatch.setattr(topology, "_core", core)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByPciBusId", unknown)
    found = topology.gpu_path(0, 1)
    assert (found.name, found.limit_gb_per_s) == ("peer access", None)
    assert found.source.startswith("NVML: ")


def test_gpus_are_named_whatever_cuda_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [b"NVIDIA H200", "NVIDIA H200"]  # NVML's modules differ in what they return
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(names))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", names.__getitem__)
    assert topology.gpu_names() == ["NVIDIA H200", "NVIDIA H200"]

    def lost(index: int) -> object:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lost)
    assert topology.gpu_names() == []
