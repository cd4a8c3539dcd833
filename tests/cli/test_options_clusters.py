"""``--jobs`` and ``--on`` as typed: what is refused, before anything runs."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from mezzo.cli.options import engine_of, named_cluster
from mezzo.errors import UsageError
from mezzo.studies.on_cluster import Ray, Slurm
from mezzo.studies.side_by_side import one_after_another


@pytest.mark.parametrize("jobs", [None, 1])
def test_one_run_at_a_time_is_the_default(jobs: int | None) -> None:
    assert engine_of(jobs, None) is one_after_another


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("slurn", "--on 'slurn'; did you mean slurm", "type: --on slurm"),
        ("ray:gpus", "--on 'ray:gpus' contains 'gpus'; allowed: options as name=value", "type: --on slurm:partition="),
        ("ray:gpus=1", "--on ray:gpus=...; allowed: address, num_cpus, num_gpus", "type: --on ray:num_gpus=1"),
        ("ray:num_gpus=one", "allowed: numbers for num_cpus and num_gpus", "type: --on ray:num_gpus=1"),
    ],
)
def test_other_words_are_refused(text: str, said: str, hint: str) -> None:
    with pytest.raises(UsageError) as error:
        named_cluster(text)
    assert said in error.value.message
    assert hint in str(error.value)


@pytest.mark.parametrize(("name", "library"), [("slurm:cluster=local", "submitit"), ("ray", "ray")])
def test_a_missing_library_is_named_with_the_line_that_installs_it(
    name: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.import_module

    def without(module: str, package: str | None = None) -> Any:
        if module == library:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
        return found(module, package)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(UsageError) as error:
        named_cluster(name)
    short = name.partition(":")[0]
    assert error.value.message == f"--on {short} needs {library}, which is not installed"
    assert error.value.hint == f"pip install {library}"


def test_slurm_without_sbatch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match="sbatch was not found") as error:
        named_cluster("slurm:partition=gpu")
    assert "--on slurm:cluster=local" in str(error.value)


def test_a_clusters_options_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda name: None)
    made = named_cluster("ray:address=auto,num_gpus=0.5,num_cpus=4")
    assert isinstance(made, Ray)
    assert (made._address, made._gpus, made._cpus) == ("auto", 0.5, 4.0)


@pytest.mark.parametrize(
    ("text", "gives_gpus"),
    [
        ("slurm:cluster=local,gres=gpu:1", False),
        ("slurm:gres=gpu:h100:1", True),
        ("slurm:gpus-per-task=1", True),
        ("slurm:partition=gpu", None),  # the partition may give one: the run knows
        ("ray:num_gpus=1", True),
        ("ray:num_gpus=0.5", False),
        ("ray", False),  # there is none here
    ],
)
def test_whether_each_run_has_a_gpu_follows_from_the_options(
    text: str, gives_gpus: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mezzo.studies.on_cluster.shutil.which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(importlib, "import_module", lambda name: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    made = named_cluster(text)
    assert isinstance(made, Ray | Slurm)
    assert made.gives_gpus is gives_gpus
