"""The command with two replicas on Ray Serve, in processes of their own."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

psutil = pytest.importorskip("psutil")
pytest.importorskip("ray.serve")

from bayesify.serve.cluster import Deployment  # noqa: E402

ROOT = Path(__file__).parents[2]


def ask(url, body=None, **headers):
    """Return the status and the content of an answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def replicas(process):
    """Return the processes that hold the guard."""
    found = {}
    for one in psutil.Process(process.pid).children(recursive=True):
        try:
            title = " ".join(one.cmdline())
        except psutil.Error:
            continue
        if "ServeReplica" in title and "Replica" in title.replace("ServeReplica", ""):
            found[one.pid] = one
    return found


@pytest.mark.slow
def test_two_replicas_answer_survive_and_stop(guard, inputs, tmp_path):
    guard.save(tmp_path / "guard")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "bayesify", "serve", str(tmp_path / "guard"), "--model", "tests.serve.nets:larger"]
    command += ["--port", str(port), "--timeout", "60"]
    environment = {**os.environ, "BAYESIFY_TOKEN": "s3cret", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:
        try:
            said = []
            for line in process.stderr:
                said.append(line)
                if "answers, with 2 replica(s)" in line:
                    break
            else:
                pytest.fail("".join(said)[-3000:])
            own = {"Authorization": "Bearer s3cret"}
            assert ask(f"{url}/predict", {"inputs": inputs.tolist()})[0] == 401
            expected = guard(inputs)
            for _ in range(4):
                status, text = ask(f"{url}/predict", {"inputs": inputs.tolist()}, **own)
                lines = json.loads(text)["verdicts"]
                assert status == 200
                assert [line["verdict"] for line in lines] == expected.verdict
                torch.testing.assert_close(torch.tensor([line["p_value"] for line in lines]), expected.p_value.float())
            before = replicas(process)
            assert len(before) == 2
            os.kill(next(iter(before)), signal.SIGKILL)
            answered = 0
            for _ in range(100):  # what was in its hands may fail; the other one answers
                answered += ask(f"{url}/predict", {"inputs": inputs[:1].tolist()}, **own)[0] == 200
                if answered >= 5 and len(replicas(process)) == 2:
                    break
                time.sleep(0.3)
            assert answered >= 5
            for _ in range(100):  # one input again and again is not what the guard knows, which it sees after a while
                status, text = ask(f"{url}/metrics", **own)
                assert status == 200
                if "bayesify_monitor_alarm 1.0" in text:
                    break
                ask(f"{url}/predict", {"inputs": inputs[:1].tolist()}, **own)
            else:
                pytest.fail(text)
        finally:
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert "Stopped." in out
    with pytest.raises(OSError, match="refused"):
        ask(f"{url}/health")


@pytest.mark.parametrize("wrong", [{"replicas": 0}, {"threads": 0}, {"port": 70_000}])
def test_deployments_are_checked(wrong):
    with pytest.raises(ValueError, match="at least one replica"):
        Deployment(load=lambda: None, **wrong)
