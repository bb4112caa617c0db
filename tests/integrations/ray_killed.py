"""Run by test_ray.py in a process of its own: a million is not needed to see that rows are neither lost nor doubled.

Two workers score 4,000 rows; the one that sees row 2,500 kills itself the first time. What comes out is compared with
one process that was left alone.
"""

import json
import os
import signal
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
import numpy as np  # noqa: E402
import ray  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

import bayesify  # noqa: E402
from bayesify.decide import Guard, Verdicts  # noqa: E402
from bayesify.integrations.ray import score  # noqa: E402

MARK, ROWS, FATAL = Path(sys.argv[1]), 4000, 2500


def inputs(columns):
    if FATAL in columns["row"] and not MARK.exists():
        MARK.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.as_tensor(columns["x"].copy())


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(ROWS, 3)
    network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    posterior = bayesify.convert(network, bayesify.MCDropout()).eval()
    labels = network.eval()(x[:800]).argmax(1)
    guard = Guard.fit(posterior, [(x[:800], labels)], max_risk=0.05, num_draws=5, class_names=["red", "green", "blue"])
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=2**30)
    ray.data.DataContext.get_current().enable_progress_bars = False
    items = [{"row": i, "x": one} for i, one in enumerate(x.numpy())]
    rows = ray.data.from_items(items, override_num_blocks=16)
    found = score(rows.materialize(), guard, inputs, workers=2, batch_size=250).to_pandas().sort_values("row")
    alone = Verdicts.join(
        [guard(part) for part in x.split(250)]
    ).to_pandas()  # another size of batches is other rounding
    numbers = ["confidence", "total", "aleatoric", "epistemic", "p_value"]
    answer = {
        "killed": MARK.exists(),
        "rows": found["row"].tolist() == list(range(ROWS)),
        "words": all(found[name].tolist() == alone[name].tolist() for name in ("verdict", "label")),
        "sets": [list(one) for one in found["prediction_set"]] == alone["prediction_set"].tolist(),
        "apart": float(np.abs(found[numbers].to_numpy() - alone[numbers].to_numpy()).max()),
        "kinds": sorted(set(found["verdict"])),
    }
    ray.shutdown()
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
