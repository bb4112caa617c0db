"""The service over HTTP, in one process."""

import io
import json
import re
from collections import Counter

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image

from bayesify.decide import Monitor
from bayesify.serve import Limits, LocalWatch, OverloadError, Report, Service, Watch, application

KIND = {"Content-Type": "application/json"}


@pytest.fixture
def client(guard):
    service = Service(guard, limits=Limits(max_rows=8, max_bytes=2000))
    with TestClient(application(service)) as client:
        client.service = service
        yield client


def figures(client, **options):
    text = client.get("/metrics", **options).text
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def test_predictions_are_the_guards(client, guard, inputs):
    answer = client.post("/predict", json={"inputs": inputs[:8].tolist()})
    assert answer.status_code == 200
    verdicts = guard(inputs[:8])
    found = answer.json()["verdicts"]
    assert [line["verdict"] for line in found] == verdicts.verdict
    assert [line["p_value"] for line in found] == verdicts.p_value.tolist()
    assert [line["reason"] for line in found] == verdicts.reason
    assert "probs" not in found[0]
    assert set(client.post("/predict?probs=true", json={"inputs": [[1, 2]]}).json()["verdicts"][0]["probs"]) == {
        "left",
        "right",
    }


def test_an_image_is_what_its_pixels_are(image_guard, images):
    pixels = np.random.default_rng(0).integers(0, 255, (4, 4, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    with TestClient(application(Service(image_guard, images))) as client:
        found = client.post("/predict", content=file.getvalue(), headers={"Content-Type": "image/png"}).json()
    expected = image_guard(((torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255) - 0.5) / 0.25)
    assert found["verdicts"][0]["p_value"] == expected.p_value.item()
    assert found["verdicts"][0]["verdict"] == expected.verdict[0]


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{", KIND, 422),
        (b'{"inputs": [[1, 2, 3]]}', KIND, 422),
        (b"x" * 2001, KIND, 413),
        (json.dumps({"inputs": [[0, 0]] * 9}).encode(), KIND, 413),
        (b"x", {"Content-Type": "text/html"}, 415),
        (b"x", {"Content-Type": "image/png"}, 415),
    ],
)
def test_wrong_requests_get_a_sentence_and_the_next_one_an_answer(client, body, headers, status):
    answer = client.post("/predict", content=body, headers=headers)
    assert answer.status_code == status
    assert answer.json()["error"].endswith((".", "}]}."))
    assert client.post("/predict", json={"inputs": [[1, 2]]}).status_code == 200


def test_a_body_without_a_length_is_bounded_too(client):
    def parts():
        for _ in range(100):
            yield b"[" * 100

    assert client.post("/predict", content=parts(), headers=KIND).status_code == 413


def test_overload_and_lateness(client, monkeypatch):
    def refuse(*args, **options):
        raise OverloadError(2.3)

    with monkeypatch.context() as patch:
        patch.setattr(client.service, "batcher", refuse)
        answer = client.post("/predict", json={"inputs": [[1, 2]]})
    assert answer.status_code == 503
    assert answer.headers["Retry-After"] == "3"
    with monkeypatch.context() as patch:
        patch.setattr(type(client.service.pace), "wait", property(lambda pace: 1.7))
        answer = client.post("/predict", json={"inputs": [[1, 2]]})
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")
    client.service.batcher.timeout, client.service.limits = 1e-9, Limits(timeout=1e-9)
    answer = client.post("/predict", json={"inputs": [[1, 2]]})
    assert answer.status_code in (408, 504)


def test_a_token_is_asked_for_where_there_is_one(guard):
    with TestClient(application(Service(guard, token="s3cret"))) as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}):
            answer = client.post("/predict", json={"inputs": [[1, 2]]}, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert client.get("/metrics", headers=headers).status_code == 401
        own = {"Authorization": "Bearer s3cret"}
        assert client.post("/predict", json={"inputs": [[1, 2]]}, headers=own).status_code == 200
        assert (
            client.get("/health").status_code == client.get("/ready").status_code == client.get("/").status_code == 200
        )
        assert figures(client, headers=own)['bayesify_requests_total{status="401"}'] == 3
        assert "s3cret" not in client.get("/").text + client.get("/openapi.json").text


def test_figures(client, guard, inputs):
    client.post("/predict", json={"inputs": inputs[:8].tolist()})
    client.post("/predict", json={"inputs": inputs[8:].tolist()})
    client.post("/predict", content=b"{", headers=KIND)
    found = figures(client)
    verdicts = guard(inputs)
    counts = Counter(verdicts.verdict)
    for name in ("answer", "ask", "ood"):
        assert found[f'bayesify_verdicts_total{{verdict="{name}"}}'] == counts[name]
    assert found['bayesify_requests_total{status="200"}'] == found["bayesify_request_seconds_count"] == 2
    assert found['bayesify_requests_total{status="422"}'] == 1
    assert found["bayesify_batch_rows_count"] == 2
    assert found["bayesify_batch_rows_sum"] == len(inputs)
    assert found["bayesify_ood_share"] == pytest.approx(counts["ood"] / len(inputs))
    assert found["bayesify_monitor_inputs"] == len(inputs)
    assert found["bayesify_monitor_alarm"] == 0
    monitor = guard.monitor()
    monitor.update(verdicts)
    assert found["bayesify_monitor_evidence"] == pytest.approx(monitor.evidence, abs=1e-9)


def test_the_monitors_alarm_is_a_figure(client):
    equal = [[0.1, 0.1001]] * 8  # of which no answer is known
    for _ in range(20):
        client.post("/predict", json={"inputs": equal})
    found = figures(client)
    assert found["bayesify_monitor_alarm"] == 1
    assert found["bayesify_ood_share"] == 1


def test_reports_of_several_replicas_add_up():
    watch = Watch(Monitor(known=1000))
    for _ in range(2):
        watch.add(Report(Counter({200: 1, 503: 4}), [0.03], [(3, 0.02)], [0, 1, 2], [0.5, 0.2, 0.01]))
    assert watch.monitor.seen == 6
    assert watch.monitor.counts == {"answer": 2, "ask": 2, "ood": 2}
    assert 'bayesify_requests_total{status="503"} 8.0' in watch.text()
    assert not Report()


def test_a_watch_that_fails_costs_figures_and_no_answers(guard):
    class Broken(LocalWatch):
        async def add(self, report):
            raise OSError("gone")

    with TestClient(application(Service(guard, watch=Broken(Watch(guard.monitor()))))) as client:
        assert client.post("/predict", json={"inputs": [[1, 2]]}).status_code == 200


def test_stopping_refuses_new_requests(client):
    assert client.get("/ready").json()["status"] == "ready"
    client.service.stopping = True
    assert client.get("/ready").status_code == 503
    answer = client.post("/predict", json={"inputs": [[1, 2]]})
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert client.get("/health").status_code == 200


def test_the_description_names_all_that_is_answered(client):
    found = client.get("/openapi.json").json()
    assert set(found["paths"]) == {"/predict", "/health", "/ready", "/metrics"}
    call = found["paths"]["/predict"]["post"]
    assert {"application/json", "image/png"} <= set(call["requestBody"]["content"])
    assert {"200", "401", "408", "413", "415", "422", "503", "504"} <= set(call["responses"])
    schema = call["responses"]["200"]["content"]["application/json"]["schema"]["properties"]["verdicts"]["items"]
    line = client.post("/predict?probs=1", json={"inputs": [[1, 2]]}).json()["verdicts"][0]
    assert set(line) <= set(schema["properties"])


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_need_nothing_from_elsewhere(client, path):
    answer = client.get(path)
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//|@import|url\(", answer.text)
    assert "/*ABOUT*/null" not in answer.text
    about = json.loads(re.search(r"const about = (.*);", answer.text)[1])
    assert about["classes"] == ["left", "right"]


def test_names_of_classes_cannot_leave_the_script(guard):
    own = type(guard)(**{**vars(guard), "class_names": ("</script><b>", "right")})
    text = Service(own).page("start.html")
    assert "</script><b>" not in text
    assert json.loads(re.search(r"const about = (.*);", text)[1])["classes"][0] == "</script><b>"


@pytest.mark.parametrize("wrong", [{"timeout": 0}, {"max_rows": 0}, {"max_bytes": -1}])
def test_limits_are_checked(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        Limits(**wrong)
