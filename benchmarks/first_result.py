"""How long a new user waits: a fresh environment, `pip install`, and the first result for a table, an image, a text.

`python -m benchmarks.first_result` makes an environment for each, installs the extra that its example needs, and runs
the example twice: the first run compiles Python files, the second is what every later one takes. It prints seconds of
the clock and of the CPU. `--pip="-c constraints.txt"` gives pip more words.

The seconds of pip are mostly those of the download. No example loads weights: a model of transformers is a small one.
"""

from __future__ import annotations

import argparse
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

__all__ = ["EXAMPLES", "measure"]

ROOT = Path(__file__).parents[1]

TABLE = """
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from bayesify.integrations.sklearn import BayesClassifier

X, X_test, y, y_test = train_test_split(*load_breast_cancer(return_X_y=True), random_state=0)
model = BayesClassifier(epochs=10).fit(X, y)
print("accuracy %.3f" % model.score(X_test, y_test), model.predict_uncertainty(X_test)["epistemic"][:3])
"""

IMAGE = """
import torch, bayesify
from torch import nn
from torch.utils.data import DataLoader

train, val, test = (DataLoader(bayesify.data.load("digits", part), 64) for part in ("train", "val", "test"))
network = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))
plain = bayesify.convert(network, bayesify.MAP(lr=0.05, epochs=5))  # or a network that you trained
bayesify.fit(plain, train, progress=False)
posterior = bayesify.choose(plain.network, val, passes=2, verbose=False)
print("accuracy %.3f" % bayesify.evaluate(posterior, test).metrics["accuracy"])
print(bayesify.predict(posterior, test).epistemic[:3])
"""

TEXT = """
import torch, bayesify
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast
from bayesify.integrations.transformers import loader

words = "[PAD] [UNK] it was very rather good great fine bad poor dull".split()
core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
core.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]")
texts = [f"it was {how} {word}" for how in words[4:6] for word in words[6:]]
rows = [{**tokenizer(text), "label": int(text.split()[-1] in words[6:9])} for text in texts]
sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
network = BertForSequenceClassification(BertConfig(vocab_size=len(words), **sizes))  # or from_pretrained(...)
posterior = bayesify.convert(network, bayesify.SWAG(optimizer="adam", lr=3e-3, epochs=20))
bayesify.fit(posterior, loader(posterior, rows, tokenizer, batch_size=4), progress=False)
print(bayesify.predict(posterior, loader(posterior, ["it was good", "it was unheard of"], tokenizer)))
"""

EXAMPLES = {"table": ("sklearn", TABLE), "image": ("demo", IMAGE), "text": ("transformers", TEXT)}


def measure(command: list[str], folder: Path) -> tuple[float, float, str]:
    """Run a command; return seconds of the clock, of the CPU with its children's, and the last line that it printed."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command[:4])} ... failed:\n{done.stderr[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, cpu, (done.stdout.strip().splitlines() or [""])[-1]


def main() -> None:
    """Print a line for each step of each example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=[*EXAMPLES], help=f"of {', '.join(EXAMPLES)}")
    parser.add_argument("--pip", default="", help="more words for pip install")
    options = parser.parse_args()
    print(f"{'':<8}{'step':<14}{'clock s':>9}{'CPU s':>8}")
    for kind in options.kinds:
        extra, example = EXAMPLES[kind]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            python = str(folder / "environment" / "bin" / "python")
            (folder / "example.py").write_text(example)
            pip = [python, "-m", "pip", "install", "-q", *shlex.split(options.pip), f"{ROOT}[{extra}]"]
            steps = {
                "environment": ([sys.executable, "-m", "venv", "environment"], folder),
                "pip install": (pip, ROOT),
                "first run": ([python, "example.py"], folder),
                "second run": ([python, "example.py"], folder),
            }
            for step, (command, where) in steps.items():
                wall, cpu, said = measure(command, where)
                print(f"{kind:<8}{step:<14}{wall:>9.1f}{cpu:>8.1f}  {said}", flush=True)


if __name__ == "__main__":
    main()
