"""What a record says about the machine and the versions behind it."""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch

from mezzo import devices
from mezzo.measure import environment as module
from mezzo.measure.environment import cudnn_text, environment, nvidia_driver, package_version
from mezzo.version import VERSION


def test_the_environment_of_a_run_on_the_cpu() -> None:
    before = datetime.now(timezone.utc) - timedelta(seconds=1)
    found = environment("cpu")
    assert before <= datetime.fromisoformat(found.date) <= datetime.now(timezone.utc)
    assert found.date.endswith("+00:00")
    assert (found.mezzo, found.torch) == (VERSION, torch.__version__)
    assert (found.python, found.os) == (platform.python_version(), platform.platform())
    assert (found.cpu, found.threads, found.device) == (devices.cpu_name(), torch.get_num_threads(), "cpu")
    assert (found.gpu, found.driver, found.cuda) == (None, None, torch.version.cuda)


def test_the_environment_of_a_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = devices.Device(kind="cuda", name="NVIDIA A100", capability=(8, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(devices, "this_device", {"cuda": gpu}.__getitem__)
    monkeypatch.setattr(module, "nvidia_driver", lambda: "570.86.15")
    found = environment("cuda")
    assert (found.device, found.gpu, found.driver) == ("cuda", "NVIDIA A100", "570.86.15")
    assert (found.cuda, found.cudnn) == ("12.8", "9.10.2")
    on_cpu = environment("cpu")  # the same machine, another device: its GPU is not asked
    assert (on_cpu.gpu, on_cpu.driver, on_cpu.cuda) == (None, None, "12.8")


def test_a_missing_device_is_not_queried() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    found = environment("cuda")
    assert (found.device, found.gpu, found.driver) == ("cuda", None, None)


@pytest.mark.parametrize(
    ("number", "text"), [(None, None), (91002, "9.10.2"), (90100, "9.1.0"), (8902, "8.9.2"), (7605, "7.6.5")]
)
def test_cudnn_numbers_read_as_versions(number: int | None, text: str | None) -> None:
    assert cudnn_text(number) == text


def test_the_first_installed_package_gives_the_version() -> None:
    assert package_version("no-such-package-of-mezzo", "pytest", "mezzo") == pytest.__version__
    assert package_version("no-such-package-of-mezzo") is None


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for nvidia-smi is a shell script")
@pytest.mark.parametrize(
    ("script", "driver"),
    [
        (
            '[ "$*" = "--query-gpu=driver_version --format=csv,noheader" ] && echo 570.86.15 && echo 570.86.15',
            "570.86.15",
        ),
        ("true", None),  # it finds no GPU
        ("echo 'NVIDIA-SMI has failed'; exit 9", None),
    ],
)
def test_the_driver_is_what_nvidia_smi_prints(
    script: str, driver: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia_driver() == driver


def test_without_nvidia_smi_there_is_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia_driver() is None


@pytest.mark.parametrize("error", [OSError("gone"), subprocess.TimeoutExpired("nvidia-smi", 10)])
def test_an_nvidia_smi_that_hangs_or_vanishes_gives_no_driver(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(subprocess, "run", fail)
    assert nvidia_driver() is None


def test_importing_the_module_imports_no_torch() -> None:
    code = "import sys, mezzo.measure.environment, mezzo.measure.doctor, mezzo.commands.compare.judge; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
