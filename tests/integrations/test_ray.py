"""Verdicts on Ray Data are those of one process, whoever dies on the way."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import bayesify
from bayesify.data import Records, TableEncoding
from bayesify.decide import Guard
from bayesify.integrations.ray import Scorer, score

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def table():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(400, 2, generator=generator)


def guard_of(network, table, **options):
    return Guard.fit(bayesify.convert(network, "map"), [(table, table.argmax(1))], max_risk=0.1, **options)


@pytest.fixture(scope="module")
def guard(table):
    network = nn.Linear(2, 2, bias=False)
    network.weight.data.copy_(20 * torch.eye(2))
    return guard_of(network, table, class_names=["left", "right"])


def test_a_batch_of_columns_becomes_a_table_of_verdicts(guard, table):
    columns = {"a": table[:, 0].numpy(), "b": table[:, 1].numpy(), "id": np.arange(400)}
    found = Scorer(guard, ["a", "b"], ("id",))(columns).to_pydict()
    alone = guard(table)
    assert found["id"] == list(range(400))
    assert found["verdict"] == alone.verdict
    assert found["label"] == [("left", "right")[index] for index in alone.label.tolist()]
    assert found["p_value"] == alone.p_value.tolist()
    assert found["reason"] == alone.reason
    by_column = Scorer(guard, "x", None)({"x": table.numpy(), "id": np.arange(400)}).to_pydict()
    assert by_column == found


def test_rows_that_cannot_be_encoded_are_told(guard):
    rows = [{"a": i, "b": -i, "label": "xy"[i % 2]} for i in range(10)]
    encoding = TableEncoding.fit([Records.of(rows)], "label", scaled=False)
    columns = {"a": np.array(["3", "three", "1"], object), "b": np.array([-3, -3, 5])}
    found = Scorer(guard, encoding, ("a",))(columns).to_pydict()
    assert found["verdict"][1] == "unreadable"
    assert found["error"] == [None, "'three' in the column 'a' is not a number", None]
    assert found["label"] == ["left", None, "right"]
    nothing = Scorer(guard, encoding, ("a",))({name: values[1:2] for name, values in columns.items()})
    assert nothing.schema == Scorer(guard, encoding, ("a",))(columns).schema


def test_wrong_numbers_of_workers_are_refused(guard):
    with pytest.raises(ValueError, match="at least 1"):
        score(None, guard, "x", workers=0)


@pytest.mark.slow
def test_a_killed_worker_loses_and_doubles_nothing(tmp_path):
    script = Path(__file__).with_name("ray_killed.py")
    words = [sys.executable, "-W", "ignore", str(script), str(tmp_path / "killed")]
    own = {
        **os.environ,
        "RAY_AUTH_MODE": "disabled",
        "RAY_worker_niceness": "0",
    }  # or a busy machine starves the workers
    done = subprocess.run(words, env=own, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    apart = found.pop("apart")
    assert found == {"killed": True, "rows": True, "words": True, "sets": True, "kinds": ["answer", "ask", "ood"]}
    assert apart < 1e-6
