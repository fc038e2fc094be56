"""What must be refused is refused, with one clear line, and the server goes on."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from loadgauge.page.server.guard import FILE_LIMIT, JSON_LIMIT, NAMES
from loadgauge.page.server.pages import FOLDER
from serving import SMALL, TOKEN, Served, alive, serving

PATHS = (
    "/api/catalogue", "/api/estimate", "/api/explain", "/api/changes", "/api/plan", "/api/what_if", "/api/drop",
    "/api/snapshot", "/api/export", "/api/why", "/api/fitting", "/api/validation",
)  # fmt: skip


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as found:
        yield found


def refused(answer: httpx.Response, status: int, word: str = "") -> None:
    """One clear line, of the status that is meant."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body["error"]
    assert "\n" not in body["error"]
    assert "Traceback" not in body["error"]
    assert word in body["error"]


# -- who asks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], f"{TOKEN}t", "é"])
def test_no_answer_without_the_token(served: Served, path: str, token: str) -> None:
    method = "GET" if path in ("/api/catalogue", "/api/validation") else "POST"
    headers = {"X-Loadgauge-Token": token.encode()} if token else {}
    with httpx.Client(base_url=str(served.client.base_url)) as stranger:
        refused(stranger.request(method, path, headers=headers, content=b"{}"), 401, "token")


def test_the_page_needs_the_token_once(served: Served) -> None:
    with httpx.Client(base_url=str(served.client.base_url)) as browser:
        refused(browser.get("/"), 401, "token")
        refused(browser.get("/?token=wrong"), 401, "token")
        shown = browser.get("/?token=wrong", headers={"Accept": "text/html,*/*"})  # as a browser asks
        assert (shown.status_code, shown.headers["content-type"]) == (401, "text/html; charset=utf-8")
        assert (
            "<p>loadgauge: the token is missing or wrong; open the address that `loadgauge serve` printed</p>"
            in shown.text
        )
        refused(browser.get(f"/?token=wrong&token={TOKEN}"), 401, "token")
        first = browser.get(f"/?token={TOKEN}")
        assert first.status_code == 200
        assert TOKEN in first.text
        # The browser has its cookie now, which no script can read and no other page sends.
        assert "httponly" in first.headers["set-cookie"].lower()
        assert "samesite=strict" in first.headers["set-cookie"].lower()
        assert browser.get("/").status_code == 200
        # It opens the page, and nothing else.
        refused(browser.get("/api/catalogue"), 401, "token")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "127.0.0.1.evil:{port}"]
)
def test_another_host_is_refused(served: Served, host: str) -> None:
    name = host.format(port=served.port)
    refused(served.client.get(f"/?token={TOKEN}", headers={"Host": name}), 421, "host")
    refused(served.client.get("/api/catalogue", headers={"Host": name}), 421, "host")


def test_no_host_is_refused(served: Served) -> None:
    assert b"421" in served.raw(b"GET / HTTP/1.0\r\n\r\n").split(b"\r\n")[0]


@pytest.mark.parametrize("name", NAMES)
def test_the_names_of_this_machine_are_served(served: Served, name: str) -> None:
    headers = {
        "Host": f"{name}:{served.port}",
        "Origin": f"http://{name}:{served.port}",
        "Sec-Fetch-Site": "same-origin",
    }
    assert served.client.get("/api/catalogue", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "https://127.0.0.1:{port}"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_other_pages_are_refused(served: Served, headers: dict[str, str]) -> None:
    shown = {name: value.format(port=served.port) for name, value in headers.items()}
    refused(served.client.post("/api/estimate", json={"flags": SMALL}, headers=shown), 403, "other pages")


def test_a_link_to_the_page_may_stand_elsewhere(served: Served) -> None:
    """With the token it opens the page; the browser sends no cookie with it, and shows it in no frame."""
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    with httpx.Client(base_url=str(served.client.base_url), headers=headers) as browser:
        answer = browser.get(f"/?token={TOKEN}")
        assert answer.status_code == 200
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        refused(browser.get("/static/index.html"), 403, "other pages")
    with httpx.Client(base_url=str(served.client.base_url), headers=headers) as stranger:
        refused(stranger.get("/"), 401, "token")


def test_it_listens_on_the_loopback_address_only() -> None:
    from loadgauge.page.command import ADDRESS, _listen

    listening = _listen(0)
    try:
        assert listening.getsockname()[0] == ADDRESS == "127.0.0.1"
    finally:
        listening.close()


@pytest.mark.parametrize("path", ["/", "/api/catalogue", "/nothing", "/api/nothing"])
@pytest.mark.parametrize("token", ["", TOKEN])
def test_every_answer_has_the_security_headers(served: Served, path: str, token: str) -> None:
    with httpx.Client(base_url=str(served.client.base_url), headers={"X-Loadgauge-Token": token}) as anybody:
        headers = anybody.get(path, params={"token": token}).headers
    assert "default-src 'self'" in headers["content-security-policy"]
    assert "script-src 'self';" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert "server" not in headers
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"])
def test_other_methods_are_refused(served: Served, method: str) -> None:
    refused(served.client.request(method, "/api/estimate"), 405)


# -- what they send ----------------------------------------------------------------------------------------------------


def test_a_body_that_says_it_is_too_large_is_not_read(served: Served) -> None:
    head = f"POST /api/estimate HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nX-Loadgauge-Token: {TOKEN}\r\n"
    answer = served.raw(f"{head}Content-Length: {JSON_LIMIT + 1}\r\n\r\n".encode())
    assert b"413" in answer.split(b"\r\n")[0]
    assert b"is larger than 4 MiB" in answer
    answer = served.raw(f"{head}Content-Length: 99999999999999999999999\r\n\r\n".encode())
    assert b" 4" in answer.split(b"\r\n")[0]
    assert alive(served)


def test_a_body_that_does_not_say_how_large_it_is_is_counted(served: Served) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(JSON_LIMIT // 2**16 + 2):
            yield b" " * 2**16

    refused(served.client.post("/api/estimate", content=pieces()), 413, "4 MiB")
    assert alive(served)


def test_a_snapshot_may_be_larger_and_has_a_limit_too(served: Served) -> None:
    content = pickle.dumps({"segments": [], "device_traces": [[]], "padding": "x" * (JSON_LIMIT + 1)}, protocol=2)
    assert served.client.post("/api/snapshot", content=content).status_code == 200
    head = f"POST /api/snapshot HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nX-Loadgauge-Token: {TOKEN}\r\n"
    assert b"413" in served.raw(f"{head}Content-Length: {FILE_LIMIT + 1}\r\n\r\n".encode()).split(b"\r\n")[0]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"flags": 1}', b'{"flags": {"model": "gpt2"}, "more": 1}',
        b'{"flags": {"model": ["gpt2"]}}', b'{"flags": {"model": {"a": "b"}}}', b'{"flags": {"model": null}}',
        b"[" * 100_000, b'{"flags":' * 50_000, b'{"flags": {"model": "gpt2", "tp": 1e999}}',
        b'{"flags": {"model": "gpt2", "tp": ' + b"9" * 100_000 + b"}}", b'{"flags": {"model": "gpt2", "tp": NaN}}',
        b'{"flags": {"model": "gpt2\\u0000"}}', b'{"flags": {"model": "' + b"x" * 10_000 + b'"}}',
        b'{"flags": {"model": "\\ud800"}}', b'{"flags": {}}', b'{"flags": {"model": "gpt2", "tp": "-1"}}',
        b'{"flags": {"model": "gpt2", "tp": "1e3"}}', b'{"flags": {"model": "gpt2", "sequence-parallel": "perhaps"}}',
        b'{"flags": {"model": "--help"}}', b'{"flags": {"model": "gpt2", "help": "true"}}',
        b'{"flags": {"model": "gpt2", "plot": "/tmp/x.svg"}}', b'{"flags": {"model": "gpt2", "json": "true"}}',
        b'{"flags": {"model": "gpt2", "seq-len": "1 --plot=/tmp/x.svg"}}',
        b'{"flags": {"model": "gpt2"}, "want": ["nothing"]}',
    ],
)  # fmt: skip
def test_hostile_json_is_one_clear_line(served: Served, body: bytes) -> None:
    answer = served.client.post("/api/estimate", content=body)
    assert 400 <= answer.status_code < 500, answer.text[:300]
    refused(answer, answer.status_code)
    assert alive(served)


def test_paths_are_no_models(served: Served, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}')
    for name in (tmp_path, tmp_path / "config.json", "/etc/passwd", "./config.json", "../config.json", "job.yaml", "~"):
        for path in ("estimate", "explain", "changes", "plan", "export", "what_if"):
            more = {"explain": {"id": "weights"}, "export": {"dialect": "megatron"}, "what_if": {"nic": 1e9}}.get(
                path, {}
            )
            answer = served.ask(f"/api/{path}", flags={**SMALL, "model": str(name)}, **more)
            assert answer.status_code == 422, (path, answer.text)
            # What is a file by its ending is said to be none, whether it is there or not.
            assert "model" in answer.json()["error"] or answer.json()["error"] == "job.yaml: no such file"
            assert "llama" not in answer.json()["error"]


def test_paths_are_no_lengths(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("512\n512\n")
    flags = {name: value for name, value in SMALL.items() if name != "seq-len"}
    measured = f"step=1s,lengths={file}"
    for path in ("/api/estimate", "/api/plan", "/api/changes"):
        for value in (str(file), "/etc/passwd", f"{file}:length", "upload:0123456789abcdef"):
            refused(served.ask(path, flags={**flags, "lengths": value}), 422, "handed in")
        refused(served.ask(path, flags={**SMALL, "measured": measured}), 422, "cannot be named here")
    # What was handed in, and what needs no file, is read.
    key = served.answer("/api/drop", name="lengths.txt", text="512\n512\n")["flags"]["lengths"]
    assert served.answer("/api/estimate", flags={**flags, "lengths": key})["estimate"]["lengths"]["mean"] == 512
    found = served.answer("/api/estimate", flags={**flags, "lengths": "uniform:1023"})
    assert found["estimate"]["lengths"]["mean"] == 512


TRAVERSALS = (
    "/../../../../../../etc/passwd", "/static/../app.py", "/static/%2e%2e/app.py", "/%2e%2e/app.py", "/..%2fapp.py",
    "/static//etc/passwd", "//etc/passwd", "/static/..%5capp.py", "/..\\app.py", "/app.py", "/worker.py", "/static/../../cli.py",
    "/static/%00", "/static/index.html%00.js", "/static/", "/static/vendor/../../app.py", "/.git/config", "/%252e%252e/app.py",
)  # fmt: skip


@pytest.mark.parametrize("path", TRAVERSALS)
def test_no_address_leads_out_of_the_page_s_folder(served: Served, path: str) -> None:
    head = f"Host: 127.0.0.1:{served.port}\r\nX-Loadgauge-Token: {TOKEN}\r\nConnection: close\r\n\r\n"
    answer = served.raw(f"GET {path} HTTP/1.1\r\n{head}".encode())
    assert answer.split(b" ")[1] in (b"404", b"400"), answer[:100]
    assert b"import" not in answer
    assert b"root:" not in answer


def test_a_link_in_the_folder_is_not_followed(tmp_path: Path) -> None:
    from loadgauge.page.server.pages import listed

    (tmp_path / "secret.txt").write_text("secret")
    folder = tmp_path / "static"
    folder.mkdir()
    (folder / "own.css").write_text("")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "code.py").write_text("")
    assert list(listed(folder)) == ["own.css"]


def test_every_file_of_the_page_is_served(served: Served) -> None:
    from loadgauge.page.server.pages import TYPES, listed

    for name, place in listed(FOLDER).items():
        if name == "index.html":
            continue
        answer = served.client.get(f"/static/{name}", headers={"X-Loadgauge-Token": ""})
        assert answer.content == place.read_bytes()
        assert answer.headers["content-type"] == TYPES[place.suffix]
        again = served.client.get(f"/static/{name}", headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


# -- files that are handed in ------------------------------------------------------------------------------------------


class Runs:
    """A pickle of it runs a command when it is read carelessly."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> object:
        return os.system, (self.command,)


def pickles(place: Path) -> Iterator[bytes]:
    """Pickles that are no snapshots, most of them hostile."""
    attack = Runs(f"touch {place}")
    for protocol in (2, 3, 4, 5):
        yield pickle.dumps(attack, protocol=protocol)
    yield pickle.dumps({"segments": [attack], "device_traces": []})
    yield pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "addr": 0, "size": attack}]]})
    yield b"\x80\x04cbuiltins\neval\n(S'1'\ntR."  # a global without a class of its own
    yield b"\x80\x02" + b"(" * 200_000 + b"."
    yield b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."
    yield b"\x80\x04\x95" + b"\xff" * 8  # a frame of 2^64 bytes
    yield b"\x80\x04\x8e" + (2**62).to_bytes(8, "little")  # so many bytes, which are not there
    yield b"\x80\x04\x8b" + (2**31 - 1).to_bytes(4, "little")  # a whole number of 2 GiB
    yield b"\x80\x02r" + (2**31 - 1).to_bytes(4, "little") + b"."  # a memo of 2^31 places
    yield b"\x80\x02}r\xff\xff\xff\x7f."
    yield b"\x80\x02Ppersistent\n."
    yield b"\x80"
    yield pickle.dumps({"segments": "no", "device_traces": 3})
    yield pickle.dumps({"segments": [{"device": 0}], "device_traces": [[]]})


def test_hostile_pickles_run_nothing(served: Served, tmp_path: Path) -> None:
    place = tmp_path / "pwned"
    for content in pickles(place):
        refused(served.client.post("/api/snapshot", content=content), 422)
        refused(served.ask("/api/drop", name="s.pickle", base64=base64.b64encode(content).decode()), 422)
    assert not place.exists()
    assert alive(served)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", '{"model_type":' * 20_000),
        ("config.json", "[" * 100_000),
        ("config.json", '{"model_type": "llama", "hidden_size": NaN}'),
        ("config.json", '{"model_type": "llama", "model_type": "gpt2"}'),
        ("config.json", '{"model_type": "llama", "hidden_size": ' + "9" * 10_000 + "}"),
        ("config.json", '{"model_type": "llama", "hidden_size": -1}'),
        ("config.json", '{"model_type": "llama", "auto_map": {"AutoModel": "os.system"}, "hidden_size": "x"}'),
        ("config.json", '{"model_type": "no_such_model"}'),
        ("job.yaml", "a: !!python/object/apply:os.system ['true']"),
        ("job.yaml", "{" * 10_000),
        ("job.toml", "a = " + "[" * 10_000),
        ("job.py", "import os; os.system('true')"),
        ("job.sh", "x" * 200_000),
        ("empty.txt", ""),
        ("nothing.txt", "nothing at all"),
        ("binary", "\x00\x01\x02"),
        ("lengths.txt", "1\n-5\n"),
        ("lengths.txt", "99999999999999999999999999"),
        ("../../etc/cron.d/x", "nothing at all"),
    ],
)
def test_hostile_files_are_one_clear_line(served: Served, name: str, text: str) -> None:
    answer = served.ask("/api/drop", name=name, text=text)
    refused(answer, 422)
    assert "defect" not in answer.json()["error"], answer.text
    assert alive(served)


def test_what_is_no_base64_is_said(served: Served) -> None:
    refused(served.ask("/api/drop", name="s.pickle", base64="§"), 422, "base64")
    refused(served.ask("/api/drop", name="s.bin", base64=base64.b64encode(b"\xff\xfe\x00").decode()), 422, "neither")


def test_a_job_file_opens_no_other_file(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job file may name a DeepSpeed configuration; it is read where it was handed in too, and not from the disk."""
    config = {"zero_optimization": {"stage": 3}, "train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}
    (tmp_path / "secret.json").write_text(json.dumps({**config, "gradient_accumulation_steps": 4}))
    monkeypatch.chdir(tmp_path)
    arguments = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "bf16": True,
        "learning_rate": 1e-5,
    }
    for named in (str(tmp_path / "secret.json"), "secret.json", "./secret.json"):
        found = served.answer("/api/drop", name="args.json", text=json.dumps({**arguments, "deepspeed": named}))
        assert "zero" not in found["flags"]
        assert "secret.json, which says more of the run" in found["message"]
    given = json.dumps({**config, "gradient_accumulation_steps": 4})
    assert served.answer("/api/drop", name="ds.json", text=given)["kind"] == "deepspeed"
    found = served.answer("/api/drop", name="args.json", text=json.dumps({**arguments, "deepspeed": "x/ds.json"}))
    assert found["flags"]["zero"] == "3"


def test_a_job_file_names_no_model_by_path(served: Served, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}')
    text = f"base_model: {tmp_path}\nsequence_len: 512\nmicro_batch_size: 1\ngradient_accumulation_steps: 1\n"
    found = served.answer("/api/drop", name="job.yaml", text=text)
    assert "model" not in found["flags"]
    assert "not in the catalogue" in found["message"]


# -- many at once ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_two_hundred_requests_at_once_are_answered(served: Served) -> None:
    async def all_at_once() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=200)
        headers = {"X-Loadgauge-Token": TOKEN}
        async with httpx.AsyncClient(
            base_url=str(served.client.base_url), headers=headers, limits=limits, timeout=120
        ) as client:
            asked = (
                client.post("/api/estimate", json={"flags": {**SMALL, "micro-batch": 1 + n % 2}}) for n in range(200)
            )
            return await asyncio.gather(*asked)

    answers = asyncio.run(all_at_once())
    assert [answer.status_code for answer in answers] == [200] * 200
    alone = [served.answer("/api/estimate", flags={**SMALL, "micro-batch": 1 + n}) for n in range(2)]
    assert all(answer.json() == alone[n % 2] for n, answer in enumerate(answers))


def test_connections_that_say_nothing_stop_nobody(served: Served) -> None:
    import socket

    idle = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(100)]
    try:
        for one in idle:
            one.sendall(b"POST /api/estimate HTTP/1.1\r\n")
        assert alive(served)
        for one in idle:  # and none of them was hung up on to get there
            one.setblocking(False)
            with pytest.raises(BlockingIOError):
                one.recv(1)
    finally:
        for one in idle:
            one.close()
