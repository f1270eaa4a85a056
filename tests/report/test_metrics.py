"""Metrics for Prometheus: of records by hand, and over real requests."""

import http.client
import json
import re
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from run_support import start

from fedglad.report import watch
from fedglad.report.metrics import CLIENTS, CONTENT_TYPE, Metrics
from tests.report.made import record, write
from tests.report.test_watch import ask, grow, serving


def samples(text: str) -> dict[Any, float]:
    """Every sample by its name and the values of its labels, as a scraper reads it."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_dashboard_asks_for_what_there_is():
    """Names, labels and their values in examples/grafana.json against the metrics of two rounds."""
    metrics = Metrics()
    groups = {"w": {"gsi": 2.0, "baseline": 2.0, "scale": 0.9}}
    metrics.add(record(0, bytes={"down": 100, "up": 50}, groups=groups, gsi_all=1.5), at=10.0)
    clients = [{"id": "a", "weight": 1.0, "trust": 0.75}, {"id": "b", "rejected": "late"}]
    metrics.add(record(1, status="skipped", clients=clients, alarm="outlier"), at=20.0)
    labels: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(metrics.text()):
        for sample in family.samples:
            known = labels.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                known.setdefault(label, set()).add(value)
    dashboard = json.loads((Path(__file__).parents[2] / "examples" / "grafana.json").read_text())
    targets = [target for panel in dashboard["panels"] for target in panel["targets"]]
    asked: set[str] = set()
    for target in targets:
        for name, selector in re.findall(r"(fedglad_\w+)\{(.*?)\}", target["expr"]):
            asked.add(name)
            for label, _, value in re.findall(r'(\w+)(=~|=)"(.*?)"', selector):
                assert label == "job" or value in labels[name][label]
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            names = re.findall(r"fedglad_\w+", target["expr"])
            assert label == "instance" or label in labels[names[0]]
    assert asked == labels.keys()


def test_three_rounds_by_hand():
    metrics = Metrics()
    groups = {
        "w": {"gsi": 2.0, "baseline": 2.0, "scale": 0.9},
        "b": {"gsi": 2.0, "baseline": 2.0, "scale": 1.1},
    }
    metrics.add(record(0, bytes={"down": 100, "up": 50}), at=10.0)
    metrics.add(record(1, status="skipped", reason="nobody", clients=[], bytes={"down": 100}), 20.0)
    clients = [
        {"id": "a", "weight": 1.0, "trust": 0.75},
        {"id": "b", "rejected": "norm 812.5 is more than 10 times the usual 3.1"},
        {"id": "b", "rejected": "norm 9e6 is more than 10 times the usual 3.2"},
    ]
    more = {"gsi_all": 1.5, "groups": groups, "alarm": "one-sided", "averaged_accuracy": 0.9}
    metrics.add(record(2, clients=clients, **more), at=30.0)
    found = samples(metrics.text())
    assert found["fedglad_round",] == 3
    assert found["fedglad_rounds_total", "stepped"] == 2
    assert found["fedglad_rounds_total", "skipped"] == 1
    assert found["fedglad_last_success_timestamp_seconds",] == 30
    assert found["fedglad_gsi",] == 1.5
    assert (found["fedglad_factor_min",], found["fedglad_factor_max",]) == (0.9, 1.1)
    assert (found["fedglad_cohort",], found["fedglad_accepted",]) == (3, 1)
    assert found["fedglad_score", "accuracy", "newest"] == 0.8
    assert found["fedglad_score", "accuracy", "averaged"] == 0.9
    assert found["fedglad_alarms_total", "one-sided"] == 1
    assert found["fedglad_bytes_total", "down"] == 200
    assert found["fedglad_seconds_total", "train"] == 3.0
    # Numbers are left out of a reason, so that it is one series and not one a round.
    reason = "norm # is more than # times the usual #"
    assert found["fedglad_rejected_total", "b", reason] == 2
    assert found["fedglad_client_trust", "a"] == 0.75
    assert found["fedglad_client_last_reply_timestamp_seconds", "a"] == 30
    assert found["fedglad_client_last_reply_timestamp_seconds", "0"] == 10


def test_names_of_clients_that_are_hostile_and_numbers_that_are_none():
    metrics = Metrics()
    name = 'a"} 1\n# HELP \\ x'
    entry = {"id": name, "trust": float("nan"), "rejected": "\n"}
    metrics.add(record(0, clients=[entry], gsi_all=None, test_loss=float("inf")), 1.0)
    found = samples(metrics.text())
    assert found["fedglad_rejected_total", name, "\n"] == 1
    assert ("fedglad_gsi",) not in found
    assert ("fedglad_score", "loss", "newest") not in found


def test_only_the_clients_seen_last_have_series():
    metrics = Metrics()
    for t in range(3):
        entries = [{"id": t * CLIENTS + k, "trust": 1.0} for k in range(CLIENTS)]
        metrics.add(record(t, clients=entries), float(t))
    assert list(metrics.replied) == [str(2 * CLIENTS + k) for k in range(CLIENTS)]
    assert metrics.trust.keys() == metrics.replied.keys()


def test_watch_answers_a_scraper(tmp_path: Path):
    folder = write(tmp_path, [record(0)])
    with serving(folder) as server:
        status, headers, body = ask(server, "/metrics")
        assert (status, headers["Content-Type"]) == (200, CONTENT_TYPE)
        assert samples(body.decode())["fedglad_round",] == 1
        grow(folder, record(1), record(2))
        assert samples(ask(server, "/metrics")[2].decode())["fedglad_rounds_total", "stepped"] == 3
        write(folder, [record(0)])  # it went back to a checkpoint
        assert samples(ask(server, "/metrics")[2].decode())["fedglad_rounds_total", "stepped"] == 1


def test_other_machines_need_the_token(tmp_path: Path):
    folder = write(tmp_path, [record(0)])
    with watch.serve(folder, 0, "127.0.0.2") as server:  # another address of this machine
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        token, port = server.token, server.server_address[1]
        assert len(token) >= 32
        assert server.url == f"http://127.0.0.2:{port}/?token={token}"

        def get(path: str, **headers: str) -> tuple[int, dict[str, str]]:
            with closing(http.client.HTTPConnection("127.0.0.2", port, timeout=30)) as connection:
                connection.request("GET", path, headers=headers)
                answer = connection.getresponse()
                answer.read()
                return answer.status, dict(answer.getheaders())

        for path in ("/", "/data.json", "/metrics", "/?token=", f"/?token={token[:-1]}", "/x"):
            assert get(path)[0] == 401
        assert get("/", Cookie=f"fedglad_token={token}x")[0] == 401
        assert get("/metrics", Authorization="Bearer nothing")[0] == 401
        assert get("/metrics", Authorization=f"Bearer {token}")[0] == 200
        status, headers = get(f"/?token={token}")
        assert status == 200
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert get("/data.json", Cookie=cookie.partition(";")[0])[0] == 200
        assert get(f"/config.toml?token={token}")[0] == 404
        server.shutdown()


@pytest.mark.slow
def test_a_folder_that_is_not_there_yet_is_waited_for(tmp_path: Path):
    folder = tmp_path / "later"
    process = start("watch", folder, "--port", "0", "--no-browser")
    assert process.stdout
    try:
        assert "is not there yet: waiting for it" in process.stdout.readline()
        time.sleep(0.6)
        write(folder, [record(0)])
        line = process.stdout.readline()
        host = line.split()[0].split("/")[2]
        with closing(http.client.HTTPConnection(host, timeout=30)) as connection:
            connection.request("GET", "/data.json")
            (run,) = json.loads(connection.getresponse().read())["runs"]
        assert run["rounds"] == [1]
    finally:
        process.kill()
        process.communicate()
