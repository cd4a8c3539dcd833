"""Where results go: standard output, at the requested width, and a folder that contains no other results."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers_launch import children_in_this_process
from mezzo import cli
from mezzo.cli import results
from mezzo.cli.folders import new_folder, resumed_folder
from mezzo.cli.script import Script
from mezzo.cli.words import TYPED_WORDS
from mezzo.errors import UsageError
from mezzo.launch.request import Request, policy_text
from mezzo.measure.environment import variables_that_matter
from mezzo.policy import Policy
from mezzo.records import AuditRecord, DiagnoseRecord, Environment, RangesRecord, RunRecord, read_record, write_record
from mezzo.report.pages import command_text
from paths import SCRIPTS
from record_builders import check_record, compare_record, resume_check_record, run_record

PLAIN = str(SCRIPTS / "plain.py")

# --- standard output and standard error --------------------------------------------------------------------------------------

COMMANDS = [
    ("run --policy bf16 {} 4", "plain.py trained 4 steps under bf16", ""),
    ("audit --at 2 {}", "Step 2 of plain.py under as-is", ""),
    ("diagnose --steps 4 {}", "plain.py under fp16", ""),
    ("ranges --steps 2 {}", "gradients of plain.py need no loss scale in fp16", ""),
    (
        "compare --policies fp32,bf16 --seeds 1 {} 4",
        "Effective formats",
        "fp32, seed 0: 4 steps; about 1 s left\nbf16, seed 0: 4 steps\n",
    ),
    ("fallback --verbose --policy bf16 --fresh 0 {}", "Verifications", "mezzo: "),
    ("doctor", "computes natively in", ""),
]


@pytest.mark.parametrize(("typed", "headline", "progress"), COMMANDS, ids=[typed.split()[0] for typed, *_ in COMMANDS])
def test_results_go_to_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: str, headline: str, progress: str
) -> None:
    command, *rest = shlex.split(typed.format(shlex.quote(PLAIN)))
    with children_in_this_process():
        cli.main([command, "--out", str(tmp_path / "text"), *rest])
        shown = capsys.readouterr()
        cli.main([command, "--out", str(tmp_path / "json"), "--json", *rest])
        as_json = capsys.readouterr()
    files = f"{tmp_path / 'text' / 'record.json'}, {tmp_path / 'text' / 'report.html'}"
    assert headline in shown.out
    assert shown.out.endswith(f"record and report: {files}\n")
    assert re.search(r"\nNext: [^\n]*\n  ([A-Z_]+=('[^']*'|\S*) )*(mezzo|python) [^\n]*\n", shown.out)
    said = re.sub(r"^(\{.*\}|step.*)\n", "", shown.err, flags=re.M)  # what the script prints here
    assert said.startswith(progress)
    assert headline not in said
    record = json.loads(as_json.out)
    assert record["kind"] == command
    assert f"mezzo: record and report: {tmp_path / 'json' / 'record.json'}" in as_json.err


def test_a_metric_that_matches_nothing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--out", str(tmp_path), "--metric", "accuracy=([0-9.]+)", PLAIN]
    with children_in_this_process():
        assert cli.main(words) == 0
    assert f"mezzo: --metric 'accuracy=([0-9.]+)' matched nothing in the output of {PLAIN}\n" in capsys.readouterr().err


@pytest.mark.slow
def test_a_reader_that_has_gone_costs_nothing(tmp_path: Path) -> None:
    write_record(run_record("fp16"), tmp_path / "record.json")
    code = "import sys; from mezzo.cli import main; sys.stdin.read(); sys.exit(main(['doctor', '--out', 'out']))"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stdin is not None
        process.stdin.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == 0  # that of the command, not of what nobody read
    assert (tmp_path / "out" / "report.html").exists()


def test_python_m_mezzo_is_mezzo(tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("raise SystemExit('a file in the folder')\n")
    said = []
    for start in (["-m", "mezzo"], ["-c", "import sys; from mezzo.cli import main; sys.exit(main())"]):
        flags = ["-P"] if start[0] == "-c" and sys.version_info >= (3, 11) else []
        for words in (["run", "--polcy", "x", "train.py"], ["doctor", "--help"]):
            command = [sys.executable, *flags, *start, *words]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
            said.append((done.returncode, done.stdout, done.stderr))
    assert said[:2] == said[2:]
    assert (said[0][0], said[1][0]) == (2, 0)


def test_every_record_has_a_page_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = [tmp_path / place for place in ("a/out/record.json", "b/out/record.json", "c/one.json", "c/two.json")]
    for place, policy in zip(places, ("fp32", "bf16", "fp16", "fp16-pure"), strict=True):
        write_record(run_record(policy), place)
    assert cli.main(["report", *map(str, places)]) == 0
    assert cli.main(["report", "--out", str(tmp_path / "pages"), *map(str, places)]) == 0
    pages = {
        "pages/out.html": "fp32",
        "pages/out-2.html": "bf16",
        "pages/c.html": "fp16",
        "pages/c-2.html": "fp16-pure",
    }
    pages |= {"a/out/report.html": "fp32", "b/out/report.html": "bf16", "c/one.html": "fp16", "c/two.html": "fp16-pure"}
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.html")} == set(pages)
    shown = capsys.readouterr().out
    for page, policy in pages.items():
        assert f"report: {tmp_path / page}\n" in shown
        assert f"under {policy} - Mezzo</title>" in (tmp_path / page).read_text()


# --- how wide, and in which colours ------------------------------------------------------------------------------------------

WIDTHS = [
    ({}, False, 110),
    ({"COLUMNS": "60"}, False, 60),
    ({"COLUMNS": "200"}, False, 200),
    ({"COLUMNS": "0"}, False, 110),
    ({"COLUMNS": "wide"}, False, 110),
    ({"COLUMNS": "60"}, True, 60),
    ({"COLUMNS": "60", "TERM": "dumb"}, True, 60),
    ({"COLUMNS": "0"}, True, 110),
]


@pytest.mark.parametrize("stderr", [False, True])
@pytest.mark.parametrize(("variables", "terminal", "width"), WIDTHS)
def test_columns_are_obeyed(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], terminal: bool, width: int, stderr: bool
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stderr if stderr else sys.stdout, "isatty", lambda: terminal, raising=False)
    assert results.console(stderr=stderr).width == width


@pytest.mark.parametrize("width", [20, 60, 100, 110, 200])
def test_no_line_is_wider(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    write_record(compare_record(num_steps=20), tmp_path / "record.json")
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli.main(["report", str(tmp_path / "record.json")]) == 0
    table, _, rest = capsys.readouterr().out.partition("Reproduce\n")
    assert max(map(len, table.splitlines())) <= width
    assert rest.splitlines()[0] == "  " + shlex.join(compare_record(num_steps=20).command)  # a command is not wrapped


COLOURS = [({}, 0, 0), ({"FORCE_COLOR": "1"}, 1, 1), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, 1, 0)]


@pytest.mark.parametrize(("variables", "styled", "coloured"), COLOURS)
def test_colours(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variables: dict[str, str],
    styled: bool,
    coloured: bool,
) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", **variables}.items():
        monkeypatch.setenv(name, value)
    write_record(compare_record(num_steps=20), tmp_path / "record.json")
    assert cli.main(["report", str(tmp_path / "record.json")]) == 0
    printed = capsys.readouterr().out
    assert ("\x1b[" in printed) == styled
    assert (re.search(r"\x1b\[[0-9;]*\b3[1-7]m", printed) is not None) == coloured


# --- folders -----------------------------------------------------------------------------------------------------------------


def left_by(*words: str, folder: str = "", **more: Any) -> RunRecord:
    record = run_record("fp16", **more)
    surroundings = record.environment.model_copy(update={"folder": folder})
    return record.model_copy(update={"command": ["mezzo", *words], "environment": surroundings})


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    token = TYPED_WORDS.set(("run", "--out", "out", "train.py"))
    yield tmp_path / "out"
    TYPED_WORDS.reset(token)


SAME = ("run", "--out", "out", "train.py")


def test_a_folder_that_is_new_or_empty_is_taken(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert new_folder(out, "train") == out
    assert new_folder(out, "train") == out
    (out / "notes.txt").touch()
    assert new_folder(out, "train") == out
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "place", "own"),
    [
        (SAME, "{}", True),
        (SAME, "", True),  # older records do not name the folder
        (SAME, "/elsewhere", False),
        (("run", "--out", "out", "other.py"), "{}", False),
        (("compare", "--out", "out", "train.py"), "{}", False),
        (("run", "--policy", "bf16", "--out", "out", "train.py"), "{}", False),
    ],
)
def test_only_the_same_command_replaces_its_record(
    out: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], place: str, own: bool
) -> None:
    write_record(left_by(*words, folder=place.format(out.parent)), out / "record.json")
    (out / "report.html").touch()
    before = (out / "record.json").read_bytes()
    beside = out.with_name("out-2")
    assert new_folder(out, "train") == (out if own else beside)
    assert (out / "record.json").read_bytes() == before
    said = f"mezzo: {out} already contains other results; writing to {beside} instead\n"
    assert capsys.readouterr().err == ("" if own else said)
    assert (out / "report.html").exists() is not own
    if not own:  # and this one's own is found the next time
        write_record(left_by(*SAME, folder=str(out.parent)), beside / "record.json")
        assert new_folder(out, "train") == beside


@pytest.mark.parametrize("name", ["report.html", "policy.toml"])
def test_a_persons_own_files_are_not_overwritten(out: Path, name: str) -> None:
    out.mkdir()
    (out / name).write_text("mine")
    assert new_folder(out, "train", leaves=("policy.toml",)) == out.with_name("out-2")
    assert (out / name).read_text() == "mine"


@pytest.mark.parametrize("text", ["{", "[]", '"text"', "{}", '{"command": 3}', "\udc80"])
def test_a_record_of_somebody_else_is_not_overwritten(out: Path, text: str) -> None:
    out.mkdir()
    (out / "record.json").write_bytes(text.encode(errors="surrogateescape"))
    assert new_folder(out, "train") == out.with_name("out-2")


HOLD = """
import sys
from pathlib import Path
from mezzo.cli.folders import resumed_folder
resumed_folder(Path(sys.argv[1]), out=None)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_folder_is_resumed_by_one_command_at_a_time(out: Path) -> None:
    out.mkdir()
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match="is being written to by another command; allowed: one command per folder"):
            resumed_folder(out, out=None)
        first.kill()
    assert resumed_folder(out, out=None) == out


def test_new_folders_have_names_of_their_own(out: Path) -> None:
    found = [new_folder(None, "train: fp16") for _ in range(3)]
    assert len(set(found)) == 3
    assert all(re.fullmatch(r"runs/[-\d]+-train-fp16(-\d+)?", str(folder)) for folder in found)


def test_fallback_deletes_no_folder_that_it_did_not_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "runs" / "important" / "record.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    with children_in_this_process():
        assert cli.main(["fallback", "--policy", "bf16", "--fresh", "0", "--out", ".", PLAIN]) == 0
    assert kept.read_text() == "{}"
    assert "already contains other results; writing to" in capsys.readouterr().err


# --- how to reproduce it -----------------------------------------------------------------------------------------------------

VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "0,1",
    "KERAS_BACKEND": "torch",
    "OMP_NUM_THREADS": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TORCH_LOGS": "+dynamo",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVIDIA_TF32_OVERRIDE": "0",
    "PYTHONHASHSEED": "0",
    "PYTHONPATH": "/a folder:/b",
    "HF_HOME": "/data/it's here",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/x",
    "NCCL_P2P_DISABLE": "1",
    "WORLD_SIZE": "2",
    "TF_ENABLE_ONEDNN_OPTS": "0",
}
NOT_FOR_A_RECORD = {
    "HF_TOKEN": "hf_abc",
    "HUGGING_FACE_HUB_TOKEN": "hf_abc",
    "HF_API_KEY": "x",
    "CUDA_SECRET": "x",
    "TORCH_PASSWORD": "x",
    "HF_ENDPOINT": "https://me:pass@example.org",
    "HF_DEBUG": "hf_AbCdEfGhIjKlMnOp",
    "TF_VAR_password": "x",
    "TF_CLI_CONFIG_FILE": "x",
    "WANDB_API_KEY": "x",
    "AWS_SECRET_ACCESS_KEY": "x",
    "PATH": "/bin",
    "HOME": "/root",
    "CUDA_HOME": "/usr/local/cuda",
    "CUDA_VERSION": "12.8",
    "NVIDIA_REQUIRE_CUDA": "cuda>=12",
}


def test_the_variables_that_matter_are_in_a_record_and_secrets_are_not() -> None:
    assert variables_that_matter({**VARIABLES, **NOT_FOR_A_RECORD}) == VARIABLES


PRINTS_VARIABLES = "import os, json; print(json.dumps(dict(os.environ)))"


def test_a_command_begins_with_them_as_a_shell_takes_them() -> None:
    surroundings = run_record("fp16").environment.model_copy(update={"variables": VARIABLES})
    text = command_text(["mezzo", "run", "my script.py"], surroundings)
    assert text.endswith(" mezzo run 'my script.py'")
    shown = subprocess.run(
        [
            "sh",
            "-c",
            text.replace("mezzo run", shlex.join([sys.executable, "-c", PRINTS_VARIABLES])),
        ],
        env={},
        capture_output=True,
        text=True,
        check=True,
    )
    assert VARIABLES.items() <= json.loads(shown.stdout).items()


@pytest.mark.parametrize("name", ["A$(touch hurt)", "A;B", "A B", "`A`", "Ä", "1A", ""])
def test_a_name_that_a_shell_would_execute_is_left_out(name: str) -> None:
    surroundings = run_record("fp16").environment.model_copy(update={"variables": {name: "1", "A": "2"}})
    assert command_text(["mezzo"], surroundings) == "A=2 mezzo"


@pytest.mark.parametrize("dies", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_records_what_the_shell_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool) -> None:
    text = "import os, tempfile\nos.environ['CUDA_VISIBLE_DEVICES'] = '7'\nos.chdir(tempfile.mkdtemp())\n"
    (tmp_path / "train.py").write_text(text + ("os._exit(3)" if dies else ""))
    monkeypatch.chdir(tmp_path)
    for name, value in {"CUDA_VISIBLE_DEVICES": "", "CUBLAS_WORKSPACE_CONFIG": ":16:8", "HF_TOKEN": "hf_abc"}.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run(
        [sys.executable, "-m", "mezzo", "run", "--verbose", "--out", "out", "train.py"],
        capture_output=True,
        check=False,
    )
    record = read_record(tmp_path / "out" / "record.json")
    assert isinstance(record, RunRecord)
    assert record.environment.folder == str(tmp_path)
    assert record.environment.variables["CUDA_VISIBLE_DEVICES"] == ""
    assert record.environment.variables["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert "HF_TOKEN" not in record.environment.variables
    assert b"CUBLAS_WORKSPACE_CONFIG=:16:8 CUDA_VISIBLE_DEVICES='' " in done.stdout
    assert b"hf_abc" not in done.stdout + (tmp_path / "out" / "report.html").read_bytes()


# --- what does not fit into a command ----------------------------------------------------------------------------------------


def test_a_script_may_be_given_thousands_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "count.py").write_text("import os, sys\nos._exit(len(sys.argv) // 1000)\n")
    monkeypatch.chdir(tmp_path)
    words = ["run", "--out", "out", "count.py", *(f"data/picture-{number}.png" for number in range(9000))]
    assert cli.main(words) == 9
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["record.json", "report.html"]


def test_a_request_is_read_as_it_was_packed(tmp_path: Path) -> None:
    for count in (0, 10, 100_000):
        request = Request(
            target="train.py",
            kind="script",
            arguments=tuple(map(str, range(count))),
            policy="fp16",
            record_path=str(tmp_path / "record.json"),
            command=("mezzo", "run"),
        )
        word = request.packed()
        assert len(word) < 131_072
        assert Request.unpacked(word) == request


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("as-is", "as-is"),
        ("O1:init_scale=1024", "fp16:init_scale=1024"),
        ("fp16:fp32_modules=a.toml", "fp16:fp32_modules=a.toml"),  # the end of a name, not a file
    ],
)
def test_a_policy_is_parsed_once_in_each_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, text: str
) -> None:
    parsed: list[str] = []
    parse = Policy.parse

    def counted(given: str) -> Policy:
        parsed.append(given)
        return parse(given)

    asked = None if typed == "as-is" else parse(typed)
    monkeypatch.setattr(Policy, "parse", counted)
    request = Request(
        target="train.py", kind="script", policy=asked, record_path=str(tmp_path / "record.json"), command=("mezzo",)
    )
    assert parsed == []
    assert policy_text(request.policy) == text
    assert Request.unpacked(request.packed()) == request
    assert parsed == ([] if asked is None else [text])


# --- what to do about an error -------------------------------------------------------------------------------------------------

HINT = "the script is an exported notebook: delete its lines with get_ipython()"
FAILED = run_record("fp32", num_steps=0, error="NameError: name 'get_ipython'", hint=f"{HINT}, all", exit_code=1)
_CHECK = check_record()
_COMPARISON = compare_record().model_copy(update={"runs": [run_record("fp16"), FAILED]})
WITH_HINTS = {
    "run": FAILED,
    "compare": _COMPARISON,
    "check": _CHECK.model_copy(update={"comparison": _COMPARISON}),
    "resume_check": resume_check_record(whole=FAILED),
    "audit": AuditRecord(run=FAILED, steps=[]),
    "ranges": RangesRecord(run=FAILED, policy="fp16", format="fp16", first_scale=0, little=0.01),
    "diagnose": DiagnoseRecord(run=FAILED, verdict="unfinished", detail="the script ended"),
}


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("kind", WITH_HINTS)
def test_what_to_do_about_an_error_is_on_the_page_and_once_in_the_terminal(
    kind: str, as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results.finish(WITH_HINTS[kind], tmp_path, as_json=as_json, log_to=None)
    shown = capsys.readouterr()
    text = " ".join(shown.out.replace("\u2502", " ").split())
    assert (text.count(HINT), shown.err.count(f"mezzo: {HINT}")) == (1, int(as_json)), text
    if as_json:
        assert shown.out == WITH_HINTS[kind].model_dump_json(indent=1) + "\n"
    assert HINT in html.unescape((tmp_path / "report.html").read_text(encoding="utf-8"))


def test_nothing_is_noted_of_a_run_that_did_not_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results.finish(run_record("fp32"), tmp_path, as_json=True, log_to=None)
    assert capsys.readouterr().err.startswith("mezzo: record and report: ")


def test_the_environment_of_a_folder_that_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mezzo.measure.environment import environment_without_torch

    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert isinstance(environment_without_torch(), Environment)
    os.chdir(tmp_path)


@pytest.mark.parametrize(
    ("target", "as_module", "expected"),
    [("code/my.train.py", False, "my.train-bf16"), ("package.train", True, "package.train-bf16")],
)
def test_a_new_folder_is_named_after_the_script_or_the_whole_module(
    target: str, as_module: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = Script(target=target, arguments=None, as_module=as_module, out=None, log_to=None, as_json=False)
    assert script.folder("bf16").name.endswith(f"-{expected}")
