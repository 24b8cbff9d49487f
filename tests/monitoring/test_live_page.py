"""The live page: who may read it, what it contains, and that it stays current in a browser."""

import gzip
import http.client
import json
import shutil
import socket
import threading
import time

import pytest

from greedynas import GreedyNASError
from greedynas.monitoring import live_page
from greedynas.monitoring.live_page import LiveServer
from greedynas.monitoring.live_state import live_state, signature
from greedynas.rundir.locks import Lock
from greedynas.rundir.progress import FILE
from tests.helpers import report_runs as runs

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def hostile(photos, tmp_path_factory):
    """Make a run whose names contain HTML wherever possible."""
    folder = runs.trained(tmp_path_factory.mktemp("live") / "<img src=x onerror=alert(1)>", photos, accuracy_images=6)
    runs.searched(folder, macs=(["60K"], None))
    runs.add_model(folder, "macs-60K", chosen=True, class_names=runs.HOSTILE)
    runs.add_timm(folder, "<b>rival<br>", top1=0.82, class_names=runs.HOSTILE)
    with (folder / "log.txt").open("a") as log:
        log.write("</script><script>alert(3)</script>\n")
    return folder


@pytest.fixture
def run(hostile, tmp_path):
    return shutil.copytree(hostile, tmp_path / hostile.name)


@pytest.fixture
def served(run, monkeypatch):
    monkeypatch.setattr(live_page, "QUICKEST", 0.0)
    monkeypatch.setattr(live_page, "SHARE", 1e9)
    with LiveServer(run) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server, place, host=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", place, headers={"Host": host or f"127.0.0.1:{server.server_port}", **headers})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def state_of(server, **headers):
    answer, body = get(server, f"/{server.token}/state", **headers)
    return answer, json.loads(gzip.decompress(body)) if answer.status == 200 else None


def test_only_the_loopback_address_with_the_token_answers(served):
    assert served.server_address[0] == "127.0.0.1"
    assert served.address == f"http://127.0.0.1:{served.server_port}/{served.token}/"
    for place in (
        "/",
        "/state",
        "/wrong/",
        "/wrong/state",
        f"/{served.token[:-1]}/",
        f"/?{served.token}",
        "/%FF/",
    ):
        answer, body = get(served, place)
        assert (answer.status, b"loss" in body) == (403, False), place
    answer, _ = get(served, f"/{served.token}/", host="evil.example")  # a name that points to this machine
    assert answer.status == 403
    assert get(served, f"/{served.token}/../../etc/passwd")[0].status == 404
    assert get(served, f"/{served.token}/")[0].status == 200
    for method in ("POST", "PUT", "DELETE"):
        connection = http.client.HTTPConnection("127.0.0.1", served.server_port, timeout=30)
        connection.request(method, f"/{served.token}/state")
        assert connection.getresponse().status == 501
        connection.close()


def test_every_server_has_another_token(run):
    tokens = set()
    for _ in range(5):
        with LiveServer(run) as server:
            tokens.add(server.token)
    assert len(tokens) == 5
    assert min(map(len, tokens)) >= 32


def test_the_policy_lets_nothing_else_load_or_run(served):
    answer, page = get(served, f"/{served.token}/")
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none';")
    assert "connect-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]
    assert (answer.headers["Referrer-Policy"], answer.headers["Cache-Control"]) == ("no-referrer", "no-store")
    assert b"<img src=x" not in page
    assert page.count(b"<script") == 4  # page, data, plotly, live


def test_the_state_has_the_facts_and_charts_of_the_report(served, run):
    answer, state = state_of(served)
    assert state["problem"] is None
    assert {"supernet_loss", "pool_steadiness", "filtering", "pool_losses", "front_macs"} <= state["charts"].keys()
    assert state["title"].startswith("75.0% top-1 on test images")
    assert ["epochs of the supernet", "4 of 4"] in state["tiles"]
    assert len(state["tables"]["pool"]["rows"]) == 3
    plan = {row[0]: row[1:] for row in state["tables"]["plan"]["rows"]}
    assert plan["epochs of the supernet"] == ["at most 4", "4 epochs"]
    assert plan["optimization images"] == ["160", "160"]
    again, nothing = state_of(served, **{"If-None-Match": answer.headers["ETag"]})
    assert (again.status, nothing) == (304, None)


def test_the_plan_of_a_job_is_compared_with_the_times(run):
    stages = [{"name": "supernet", "what": "4 epochs", "seconds": 90.0}, {"name": "search", "what": "", "seconds": 9.0}]
    (run / "plan.json").write_text(json.dumps({"seconds": 99.0, "stages": stages}))
    plan = {row[0]: row[1:] for row in live_state(run)["tables"]["plan"]["rows"]}
    assert plan["time of supernet"][0] == "90 s" or plan["time of supernet"][0] == "2 min"
    assert plan["time of search"][0] == "9 s"
    assert plan["time of search"][1].endswith(" s")
    (run / "plan.json").write_text("[" * 10**5)
    assert "time of search" in {row[0] for row in live_state(run)["tables"]["plan"]["rows"]}


def test_the_state_follows_the_run_also_through_damage(served, run):
    first, before = state_of(served)
    lock = Lock(run)
    progress = {"stage": "supernet", "unit": "step", "done": 3, "total": 9, "line": "supernet: step 3 of 9"}
    (run / FILE).write_text(json.dumps({**progress, "updated": time.time()}))
    _, now = state_of(served)
    assert (now["now"], now["running"], now["progress"]["done"]) == ("supernet: step 3 of 9", True, 3)
    lock.close()
    metrics = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(metrics[:100] + b"\n")
    _, broken = state_of(served)
    assert "metrics.jsonl, line 1 is malformed" in broken["problem"]
    (run / "metrics.jsonl").write_bytes(metrics + metrics.splitlines(keepends=True)[-1][:20])  # a line is being written
    _, whole = state_of(served)
    assert whole["problem"] is None
    shutil.rmtree(run)
    assert "is not a run directory" in state_of(served)[1]["problem"]
    assert before["problem"] is None
    assert first.status == 200


def test_the_signature_changes_with_every_file_that_is_shown(run):
    seen = {signature(run)}
    for name in ("metrics.jsonl", "log.txt", "searches/macs-60K/search.json", "models/macs-60K/metrics.jsonl"):
        with (run / name).open("a") as file:
            file.write(" ")
        seen.add(signature(run))
    assert len(seen) == 5


def test_a_killed_process_is_shown_although_no_file_changes(served, run):
    progress = {"stage": "supernet", "unit": "step", "done": 3, "total": 9, "line": "supernet: step 3 of 9"}
    (run / FILE).write_text(json.dumps({**progress, "updated": time.time()}))
    lock = Lock(run)
    assert state_of(served)[1]["now"] == "supernet: step 3 of 9"
    lock.close()
    assert state_of(served)[1]["now"] == "Interrupted. supernet: step 3 of 9"


def test_the_progress_of_a_short_training_is_shown(served, run):
    state_of(served)
    home = run / "models" / "macs-60K" / "top" / "1"
    home.mkdir(parents=True)
    state_of(served)
    progress = {"stage": "top 1", "unit": "step", "total": 9, "updated": time.time()}
    for done in (1, 2):
        (home / FILE).write_text(json.dumps({**progress, "done": done, "line": f"top 1: step {done} of 9"}))
        assert state_of(served)[1]["progress"]["done"] == done


def test_an_address_without_the_last_slash_leads_to_the_page(served):
    answer, _ = get(served, f"/{served.token}")
    assert (answer.status, answer.getheader("Location")) == (308, f"/{served.token}/")


def test_wrong_folders_and_ports_lead_to_one_line(run_cli, run, tmp_path):
    code, out, err = run_cli("watch", tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, out, err = run_cli("watch", run, "--port", taken.getsockname()[1])
        assert (code, out) == (2, "")
        assert "name another --port" in err
    with pytest.raises(GreedyNASError, match="not a run directory"):
        LiveServer(tmp_path)


def test_curves_grow_in_a_browser_and_nothing_hostile_runs(served, run, browser):
    problems, foreign, loads = [], [], []
    page = browser.new_context(viewport={"width": 390, "height": 844}).new_page()
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(dialog.message) or dialog.dismiss())
    page.on("load", lambda: loads.append(1))
    page.on("request", lambda request: foreign.append(request.url) if "//127.0.0.1:" not in request.url else None)
    metrics = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(metrics[: len(metrics) // 2]))
    page.add_init_script(
        "const later = setTimeout; window.setTimeout = (f, ms, ...r) => later(f, Math.min(ms, 100), ...r)"
    )
    page.goto(served.address)
    page.wait_for_selector("html[data-shown]", timeout=60_000)

    def until(condition):
        """Wait without `wait_for_function`, which the content security policy forbids."""
        for _ in range(300):
            if page.evaluate(condition):
                return
            page.wait_for_timeout(100)
        raise AssertionError(condition)

    points = "document.querySelector('#chart-supernet_loss').data[0].x.length"
    until(f"document.querySelector('#chart-supernet_loss').data && {points} > 0")
    before = page.evaluate(points)
    (run / "metrics.jsonl").write_text("".join(metrics))
    until(f"{points} > {before}")
    assert len(loads) == 1  # without a reload
    assert page.locator("#log").inner_text().endswith("</script><script>alert(3)</script>")
    assert page.locator(".run").inner_text() == "greedynas watch · <img src=x onerror=alert(1)>"
    assert "<b>rival<br>" in page.locator("#chart-models .legendtext").all_text_contents()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.context.set_offline(True)  # the server is gone: the last state stays, with a remark
    until("!document.getElementById('problem').hidden")
    assert "greedynas watch has ended" in page.locator("#problem").inner_text()
    assert page.evaluate(points) > before
    assert [one for one in problems if "Failed to load resource" not in one] == []
    assert foreign == []
