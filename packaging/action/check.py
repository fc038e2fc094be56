"""What the GitHub Action runs: `loadgauge check` against the base of the pull request, told as GitHub shows it.

Reads JOBS, FLAGS, BUDGET, AGAINST, STRICT, LINT, COMMENT and TOKEN (the inputs of `action.yml`) and GITHUB_BASE_REF; writes one
annotation a problem, the table to GITHUB_STEP_SUMMARY and into one comment of the pull request, and `ok` to GITHUB_OUTPUT. Exits as
`loadgauge check` does, except that a file that is there and cannot be read is a warning, unless STRICT is true. Needs no library.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import unquote
from urllib.request import Request, urlopen

CANNOT_TELL = 2
"""The exit code of `loadgauge check` where a job has no answer."""


def main() -> int:
    """Run the check and return its exit code."""
    words = [*shlex.split(os.environ.get("JOBS", "")), *shlex.split(os.environ.get("FLAGS", ""))]
    if budget := os.environ.get("BUDGET", "").strip():
        words += ["--budget", budget]
    if base := base_revision():
        words += ["--against", base]
    done = subprocess.run(
        [sys.executable, "-m", "loadgauge", "check", *words, "--json"], capture_output=True, text=True
    )
    try:
        found = json.loads(done.stdout)
    except ValueError:  # Nothing could be checked: what was asked is wrong.
        print(f"::error title=loadgauge::{escaped(done.stderr.strip() or 'no answer')}")
        return done.returncode or 2
    strict = os.environ.get("STRICT", "").strip().lower() == "true"
    refused = False
    for job in found["jobs"]:
        where = f"file={escaped(job['job'], inside=True)}," if Path(job["job"]).is_file() else ""
        for problem in job["problems"]:
            print(f"::error {where}title=loadgauge::{escaped(problem)}")
        if job["error"]:
            excused = bool(where) and not strict
            refused = refused or not excused
            text = escaped(job["error"].removeprefix(f"{job['job']}: "))
            print(f"::{'warning' if excused else 'error'} {where}title=loadgauge::{text}")
        for key in job["unread"]:
            if key["effect"] != "none":
                where = f"file={escaped(key['file'], inside=True)}," if Path(key["file"]).is_file() else ""
                text = f"{key['key']} is not counted: {key['why']}"
                print(f"::warning {where}title=loadgauge::{escaped(text)}")
    linted([job["job"] for job in found["jobs"] if Path(job["job"]).is_file()], os.environ.get("LINT", "").strip())
    print(found["table"])
    code = (
        done.returncode
        if refused or done.returncode != CANNOT_TELL
        else int(any(job["problems"] for job in found["jobs"]))
    )
    table = f"### Training jobs\n\n{found['table']}\n"
    commented(table)
    for variable, text in (
        ("GITHUB_STEP_SUMMARY", table),
        ("GITHUB_OUTPUT", f"ok={'false' if code else 'true'}\n"),
    ):
        if place := os.environ.get(variable):
            with open(place, "a", encoding="utf-8") as file:
                file.write(text)
    return code


def linted(files: list[str], flags: str) -> None:
    """Say beside the lines of job files what `loadgauge lint` finds, where LINT has its flags."""
    if not (files and flags):
        return
    done = subprocess.run(
        [sys.executable, "-m", "loadgauge", "lint", *files, *shlex.split(flags), "--sarif"],
        capture_output=True,
        text=True,
    )
    if done.stderr.strip():
        print(f"::warning title=loadgauge lint::{escaped(done.stderr.strip())}")
    for result in json.loads(done.stdout)["runs"][0]["results"] if done.stdout.strip() else ():
        place = result["locations"][0]["physicalLocation"]
        where = f"file={escaped(unquote(place['artifactLocation']['uri']), inside=True)},line={place['region']['startLine']}"
        kind = "notice" if result["level"] == "note" else "warning"
        print(f"::{kind} {where},title={escaped(result['ruleId'], inside=True)}::{escaped(result['message']['text'])}")


MARK = "<!-- loadgauge check -->"
"""The first line of the comment, by which it is found again."""


def commented(table: str) -> None:
    """Write the table into the comment of the pull request, the same one at each push; a token that may not is told."""
    token, event = os.environ.get("TOKEN", ""), Path(os.environ.get("GITHUB_EVENT_PATH") or os.devnull)
    if os.environ.get("COMMENT", "").strip().lower() != "true" or not token or not event.is_file():
        return
    number = json.loads(event.read_text(encoding="utf-8") or "{}").get("pull_request", {}).get("number")
    if number is None:
        return
    issues = f"{os.environ['GITHUB_API_URL']}/repos/{os.environ['GITHUB_REPOSITORY']}/issues"

    def asked(method: str, path: str, **body: str) -> Any:
        data = json.dumps(body).encode() if body else None
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/vnd.github+json"}
        with urlopen(Request(f"{issues}/{path}", data=data, headers=headers, method=method), timeout=30) as answer:
            return json.load(answer)

    try:
        earlier = (each for each in asked("GET", f"{number}/comments?per_page=100") if each["body"].startswith(MARK))
        if (comment := next(earlier, None)) is not None:
            asked("PATCH", f"comments/{comment['id']}", body=f"{MARK}\n{table}")
        else:
            asked("POST", f"{number}/comments", body=f"{MARK}\n{table}")
    except (URLError, TimeoutError) as error:
        text = f"no comment: {error}; the workflow needs `permissions: pull-requests: write`"
        print(f"::notice title=loadgauge::{escaped(text)}")


def base_revision() -> str:
    """The revision to compare with: AGAINST, or the head of the pull request's base, fetched if it is not here."""
    if asked := os.environ.get("AGAINST", "").strip():
        return asked
    branch = os.environ.get("GITHUB_BASE_REF", "").strip()
    if not branch:
        return ""
    # A checkout of one commit, as Actions make it, has no other branch.
    fetched = subprocess.run(
        ["git", "fetch", "--quiet", "--no-tags", "--depth=1", "origin", f"refs/heads/{branch}"],
        capture_output=True, text=True,
    )  # fmt: skip
    if fetched.returncode:
        print(f"::warning title=loadgauge::{escaped(f'no comparison: {fetched.stderr.strip()}')}")
        return ""
    return "FETCH_HEAD"


def escaped(text: str, inside: bool = False) -> str:
    """Text in a workflow command; inside: in one of its properties."""
    marks = {"%": "%25", "\r": "%0D", "\n": "%0A", **({":": "%3A", ",": "%2C"} if inside else {})}
    return "".join(marks.get(letter, letter) for letter in text)


if __name__ == "__main__":
    sys.exit(main())
