"""`loadgauge check`, and the GitHub Action on a repository with a pull request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from ruamel.yaml import YAML

import loadgauge
from command_line import document, typed
from documented import ROOT
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.plan.advise.budget import QUANTITIES, check, read_limits

JOB = "base_model: gpt2\nsequence_len: 1024\nmicro_batch_size: {batch}\nbf16: true\noptimizer: adamw_torch\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a job, which is the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB.format(batch=1))
    return tmp_path


def checked(line: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code and the jobs of a check."""
    found = typed(f"check {line} --json")
    return found.code, json.loads(found.out)["jobs"]


def test_the_figures_are_those_of_the_estimate(folder: Path) -> None:
    flags = "job.yaml --gpu 4090 --tokens 1B --price 0.5"
    code, (job,) = checked(flags)
    told = document(f"estimate {flags}")
    assert (code, job["memory"]["verdict"], job["problems"], job["before"]) == (0, "fits", [], None)
    time = told["time"]
    assert job["now"] == {
        "memory": told["memory"]["total"], "step": time["step"], "days": time["days"], "gpu-hours": time["gpu_hours"],
        "cost": time["cost"],
    }  # fmt: skip


def test_what_decides_is_named_with_its_answers() -> None:
    """The dtype of the weights is open, and the card holds one of the two: `check` asks as `estimate` does."""
    told = document("estimate olmo-3-7b --gpu h200 --gpus 8")["memory"]
    assert told["verdict"] == "depends"
    (problem,) = check("mine", Job("olmo-3-7b", gpu="h200", gpus=8), {}).problems
    assert f"; {told['question']['flag']} decides: " in problem
    for choice in told["question"]["choices"]:
        assert f"{choice['total'] / 2**30:,.1f} GiB, {choice['verdict'].upper()}" in problem


@pytest.mark.parametrize("name", QUANTITIES)
def test_a_budget_holds_up_to_the_figure_itself(folder: Path, name: str) -> None:
    flags = "job.yaml --gpu 4090 --tokens 1B --price 0.5"
    _, (job,) = checked(flags)
    unit = {"memory": "B", "step": "s"}.get(name, "")
    for factor, code in ((1.01, 0), (0.99, 1)):
        found, (job,) = checked(f"{flags} --budget {name}={job['now'][name] * factor}{unit}")
        assert found == code
        assert [text.partition(" ")[0] for text in job["problems"]] == [name] * code


def test_the_verdict_decides_as_it_does_for_an_estimate(folder: Path) -> None:
    verdicts = set()
    for gib in (1, 3, 4, 5, 6, 8, 16):
        flags = f"job.yaml --memory {gib}GiB"
        said = document(f"estimate {flags}")["memory"]["verdict"]
        verdicts.add(said)
        assert typed(f"check {flags}").code == typed(f"estimate {flags}").code
        assert typed(f"check {flags} --allow-tight").code == (said == "does not fit")
    assert verdicts == {"fits", "tight", "does not fit"}


def test_what_cannot_be_judged_is_said(folder: Path) -> None:
    found = typed("check job.yaml --gpu 4090 --budget cost=5")
    assert found.code == 2
    assert "cost: a budget of it needs --gpu, --tokens and --price" in found.out
    assert found.err == "loadgauge: job.yaml: cost: a budget of it needs --gpu, --tokens and --price\n"
    # One job that fails outweighs one that cannot be told.
    found = typed("check nowhere.yaml job.yaml --gpu 4090 --budget memory=1GiB")
    assert found.code == 1
    assert "nowhere.yaml" in found.out
    assert typed("check nowhere.yaml job.yaml --gpu 4090").code == 2
    assert "no loadgauge.toml" in typed("check").err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("coast=3", "did you mean cost"), ("memory", "cannot read"), ("memory=3s", "must be in bytes"), ("cost=0", "above 0"),
        ("growth=-5%", "'growth=-5%'"), ("step=5", "cannot read"), ("cost=nan", "'cost=nan'"),
    ],
)  # fmt: skip
def test_a_budget_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_limits([text])


def test_a_settings_file_has_jobs_with_flags_and_budgets(folder: Path) -> None:
    (folder / "loadgauge.toml").write_text(
        'flags = "--gpu 4090 --tokens 1B"\nbudget = ["step=100s"]\n[jobs."job.yaml"]\nflags = "--gpus 2"\n'
        '[jobs.gpt2]\nflags = "--price 1"\nbudget = ["cost=0.01"]\n'
    )
    code, jobs = checked("")
    assert code == 1
    assert [job["job"] for job in jobs] == ["job.yaml", "gpt2"]
    assert jobs[0]["now"]["days"] == document("estimate job.yaml --gpu 4090 --gpus 2 --tokens 1B")["time"]["days"]
    assert "cost" not in jobs[0]["now"]
    assert jobs[1]["problems"][0].startswith("cost")
    # What is typed goes before what is written.
    assert checked("gpt2 --price 1e-9")[0] == 0
    for text, message in (
        ("jobs = 3", "jobs"), ("flag = ''", "flag"), ("flags = '--gpus two'", "gpus"), ("[", "loadgauge.toml"),
        ("flags = '\"'", "loadgauge.toml"),
    ):  # fmt: skip
        (folder / "loadgauge.toml").write_text(text)
        found = typed("check job.yaml")
        assert found.code == 2
        assert message in found.err


def git(folder: Path, *words: str) -> None:
    """A command of git, with nobody's settings."""
    own = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "HOME": str(folder)}
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, env={**os.environ, **own})


@pytest.fixture
def pull_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shallow checkout of a branch that makes a job larger and adds one, beside the repository it is of."""
    origin, here = tmp_path / "origin", tmp_path / "here"
    jobs = origin / "configs"
    jobs.mkdir(parents=True)
    git(origin, "init", "--quiet")
    (jobs / "job.yaml").write_text(JOB.format(batch=1))
    git(origin, "add", ".")
    git(origin, "commit", "--quiet", "-m", "base")
    git(origin, "checkout", "--quiet", "-b", "change")
    (jobs / "job.yaml").write_text(JOB.format(batch=16))
    (jobs / "new.yaml").write_text(JOB.format(batch=2))
    git(origin, "add", ".")
    git(origin, "commit", "--quiet", "-m", "change")
    git(tmp_path, "clone", "--quiet", "--depth=1", "--branch", "change", f"file://{origin}", str(here))
    monkeypatch.chdir(here)
    return here


def test_a_revision_is_compared_with(pull_request: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(pull_request, "fetch", "--quiet", "--depth=1", "origin", "main")
    now = loadgauge.estimate("configs/job.yaml", gpu="h100").memory.total
    code, (job, new) = checked("configs/job.yaml configs/new.yaml --gpu h100 --against FETCH_HEAD --budget growth=5%")
    assert code == 1
    assert job["now"]["memory"] == now > 2 * job["before"]["memory"]
    assert job["problems"][0].startswith(f"memory grew by {now / job['before']['memory'] - 1:.1%}")
    assert (new["before"], new["problems"]) == (None, [])
    assert checked("configs/job.yaml --gpu h100 --against FETCH_HEAD --budget growth=9900%")[0] == 0
    # From a folder within the repository, and against a folder.
    monkeypatch.chdir(pull_request / "configs")
    _, (inside,) = checked("job.yaml --gpu h100 --against FETCH_HEAD")
    assert inside["before"] == job["before"]
    code, (same,) = checked(f"job.yaml --gpu h100 --against {pull_request / 'configs'} --budget growth=1%")
    assert (code, same["now"]["memory"]) == (0, same["before"]["memory"])
    for place in ("no-such-revision", "--output=x"):
        found = typed(["check", "job.yaml", f"--against={place}"])
        assert found.code == 2
        assert "neither a folder nor a revision" in found.err


def test_a_revision_is_read_by_the_first_releases_of_python_3_11(
    pull_request: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 3.11.4, which Debian 12 has not, archives are extracted without a filter."""
    extract = tarfile.TarFile.extractall
    monkeypatch.setattr(tarfile.TarFile, "extractall", lambda archive, path: extract(archive, path))
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    _, (job,) = checked("configs/job.yaml --gpu h100 --against HEAD")
    assert job["before"]["memory"] == job["now"]["memory"]


def act(folder: Path, **inputs: str) -> tuple[int, str, str, str]:
    """The Action's script in a folder: exit code, log, summary and outputs."""
    told = {name: str(folder.parent / name) for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
    for place in told.values():
        Path(place).write_text("", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(ROOT / "packaging/action/check.py")], cwd=folder, capture_output=True, text=True,
        env={**os.environ, "GITHUB_BASE_REF": "", **told, **inputs},
    )  # fmt: skip
    assert not done.stderr
    return done.returncode, done.stdout, *(Path(place).read_text(encoding="utf-8") for place in told.values())  # type: ignore[return-value]


class Comments(BaseHTTPRequestHandler):
    """The comments of a pull request, as GitHub keeps them; a token that is not `may` may not."""

    kept: ClassVar[list[dict[str, Any]]] = []

    def answer(self) -> None:
        """Keep or change a comment, or list all."""
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        may = self.headers["Authorization"] == "Bearer may"
        if may and self.command == "POST" and self.path == "/repos/us/jobs/issues/7/comments":
            self.kept.append({"id": len(self.kept), **body})
        elif may and self.command == "PATCH":
            self.kept[int(self.path.removeprefix("/repos/us/jobs/issues/comments/"))] |= body
        self.send_response(200 if may else 403)
        self.end_headers()
        self.wfile.write(json.dumps(self.kept).encode())

    do_GET = do_POST = do_PATCH = answer

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.mark.slow
def test_the_action_keeps_one_comment_of_a_pull_request(pull_request: Path) -> None:
    Comments.kept[:] = [{"id": 0, "body": "somebody else's"}]
    event = pull_request.parent / "event.json"
    event.write_text('{"pull_request": {"number": 7}}', encoding="utf-8")
    with HTTPServer(("127.0.0.1", 0), Comments) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        github = {
            "GITHUB_API_URL": f"http://127.0.0.1:{server.server_port}", "GITHUB_REPOSITORY": "us/jobs",
            "GITHUB_EVENT_PATH": str(event), "COMMENT": "true", "TOKEN": "may", "JOBS": "configs/job.yaml",
            "GITHUB_BASE_REF": "main",
        }  # fmt: skip
        for flags, outcome in (("--memory 8GiB", "FAILS"), ("--gpu h100", "ok")):
            _, log, summary, _ = act(pull_request, **github, FLAGS=flags)
            assert "no comment" not in log
            assert [each["body"].partition("\n")[2] for each in Comments.kept[1:]] == [summary]
            assert f"| configs/job.yaml | {outcome} |" in summary
        before = list(Comments.kept)
        for changed, told in (({"TOKEN": "may not"}, True), ({"COMMENT": "false"}, False), ({"TOKEN": ""}, False)):
            code, log, *_ = act(pull_request, **github | changed, FLAGS="--gpu h100")
            assert (code, "::notice title=loadgauge::no comment" in log) == (0, told)
        server.shutdown()
    assert Comments.kept == before


@pytest.mark.slow
def test_the_action_fails_a_pull_request_that_no_longer_fits(pull_request: Path) -> None:
    inputs = {"JOBS": "configs/job.yaml configs/new.yaml", "FLAGS": "--memory 8GiB", "GITHUB_BASE_REF": "main"}
    code, log, summary, output = act(pull_request, **inputs)
    assert code == 1
    (error,) = (line for line in log.splitlines() if line.startswith("::"))
    assert error.startswith("::error file=configs/job.yaml,title=loadgauge::does not fit")
    assert "(before: fits, " in error
    assert "| configs/job.yaml | FAILS | does not fit |" in summary
    assert "| configs/new.yaml | ok | fits |" in summary
    assert output == "ok=false\n"
    code, log, summary, output = act(pull_request, **inputs | {"FLAGS": "--gpu h100"})
    assert (code, output) == (0, "ok=true\n")
    assert "::error" not in log
    assert "+" in summary
    code, log, _, output = act(pull_request, **inputs | {"FLAGS": "--gpu h100", "BUDGET": "growth=10%"})
    assert (code, output, log.count("::error")) == (1, "ok=false\n", 2)


def test_the_action_says_beside_the_lines_what_a_job_file_wastes(pull_request: Path) -> None:
    place = pull_request / "my job.yaml"
    place.write_text(
        "base_model: gpt2\nsequence_len: 64\nmicro_batch_size: 1\nlora_r: 8\noptimizer: adamw_torch\nbf16: true\n"
    )
    inputs = {"JOBS": "'my job.yaml'", "FLAGS": "--gpu h100", "LINT": "--gpu h100 --rule dead-key"}
    code, log, *_ = act(pull_request, **inputs)
    assert code == 0
    said = [line for line in log.splitlines() if line.startswith("::notice file=my job.yaml,line=4,title=dead-key::")]
    assert len(said) == 1, log
    assert "dead-key" not in act(pull_request, **inputs | {"LINT": ""})[1]


def test_the_action_says_what_it_could_not_do(pull_request: Path) -> None:
    inputs = {"JOBS": "configs/job.yaml", "FLAGS": "--gpu h100"}
    code, log, *_ = act(pull_request, **inputs, GITHUB_BASE_REF="gone")
    assert code == 0
    assert log.startswith("::warning title=loadgauge::no comparison: ")
    code, log, *_ = act(pull_request, **inputs | {"FLAGS": "--gpuz h100"})
    assert code == 2
    assert log.startswith("::error title=loadgauge::loadgauge: no such option")


def test_a_file_that_cannot_be_read_blocks_no_pull_request_unless_strict(pull_request: Path) -> None:
    """Its error is a warning beside the file; another job that does not fit still fails, and so does a file that is not there."""
    (pull_request / "broken.yaml").write_text("a: b: [\n")
    inputs = {"JOBS": "configs/job.yaml broken.yaml", "FLAGS": "--gpu h100"}
    code, log, summary, output = act(pull_request, **inputs)
    assert (code, output) == (0, "ok=true\n")
    assert "::warning file=broken.yaml,title=loadgauge::is not valid YAML" in log
    assert "| broken.yaml | cannot tell |" in summary
    assert summary.count("broken.yaml") == 2
    code, log, _, output = act(pull_request, **inputs, STRICT="true")
    assert (code, output) == (2, "ok=false\n")
    assert "::error file=broken.yaml" in log
    assert act(pull_request, **inputs | {"FLAGS": "--memory 8GiB"})[0] == 1
    assert act(pull_request, **inputs | {"JOBS": "configs/job.yaml gone.yaml"})[0] == 2


def test_the_action_and_the_hook_name_what_exists() -> None:
    action = YAML(typ="safe").load(ROOT / "action.yml")
    (step,) = (step for step in action["runs"]["steps"] if step.get("id") == "check")
    script = (ROOT / "packaging/action/check.py").read_text(encoding="utf-8")
    assert (ROOT / "packaging/action/check.py").name in step["run"]
    for variable, value in step["env"].items():
        assert f'"{variable}"' in script
        assert value == f"${{{{ inputs.{variable.lower()} }}}}"
        assert variable.lower() in action["inputs"]
    # Inputs come as variables of the environment: nothing that a pull request names is put into a shell's text.
    assert not [step for step in action["runs"]["steps"] if "${{" in step["run"]]
    (hook,) = YAML(typ="safe").load(ROOT / ".pre-commit-hooks.yaml")
    assert hook["entry"].split() == ["loadgauge", "check"]
    assert typed("check --help").code == 0


def test_what_cannot_be_told_is_said_first(folder: Path) -> None:
    """On a terminal, where both streams are one; nothing else is printed where no job can be told."""
    for jobs, told in (("nope.yaml", False), ("nope.yaml job.yaml", True)):
        words = [sys.executable, "-m", "loadgauge", "check", *jobs.split(), "--gpu", "4090"]
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        assert done.returncode == 2
        first, *others = done.stdout.splitlines()
        assert first == "loadgauge: nope.yaml: no such file"
        assert bool(others) == told
