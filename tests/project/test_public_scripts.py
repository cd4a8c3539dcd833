"""The table of public scripts: each row has a commit, and says what the command line, folder and variables are."""

from __future__ import annotations

import re

import pytest

from paths import ROOT

if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not beside these tests", allow_module_level=True)

from benchmarks.scripts.public_scripts.__main__ import line, main
from benchmarks.scripts.public_scripts.scripts import COMMITS, SCRIPTS


def test_each_script_has_a_commit_and_a_name_of_its_own() -> None:
    assert {script.repository for script in SCRIPTS} == set(COMMITS)
    assert all(re.fullmatch("[0-9a-f]{40}", script.commit) for script in SCRIPTS)
    assert len({script.name for script in SCRIPTS}) == len(SCRIPTS) == 67
    assert {script.kind for script in SCRIPTS} == {"cpu", "cuda", "framework"}


def test_a_script_runs_in_its_folder_unless_the_table_says_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    inside, above = (next(s for s in SCRIPTS if s.file == file) for file in ("pygcn/train.py", "cleanrl/ppo.py"))
    assert (inside.where, line(inside, "fp16")) == ("pygcn", "run --policy fp16 train.py --epochs 60")
    assert (above.where, above.variables) == (".", {"PYTHONPATH": "."})
    assert line(above, "audit") == "audit cleanrl/ppo.py --total-timesteps 1024 --no-cuda"
    main(["clones", "--list", "--only", "pygcn"])
    assert capsys.readouterr().out == (
        "tkipf/pygcn@1600b5b748 in pygcn: mezzo run --policy fp16 train.py --epochs 60\n"
    )
