"""Predictions as arrays, tables, plain values, text, HTML and figures."""

import json
import sys

import numpy as np
import pytest
import torch
from scipy import stats

from bayesify import Bernoulli, Categorical, FeaturePrediction, Gaussian, RegressionPrediction

F64 = torch.float64


def classified(rows=3, extra=(), classes=4, **settings):
    logits = torch.randn(6, rows, *extra, classes, dtype=F64)
    return Categorical(class_dim=-1).from_samples(logits, **settings)


def regressed(shape=(3,), **settings):
    return Gaussian(0.5).from_samples(torch.randn(6, *shape, dtype=F64), **settings)


def test_arrays_are_the_tensors():
    prediction = classified(keep_samples=True)
    found = prediction.to_numpy()
    assert {"label", "confidence", "probs", "samples", "log_probs", *prediction.scores} <= set(found)
    for name, array in found.items():
        assert isinstance(array, np.ndarray)
        np.testing.assert_array_equal(array, getattr(prediction, name).numpy(), err_msg=name)
    assert "samples" not in classified().to_numpy()
    half = FeaturePrediction(torch.randn(2, 3).bfloat16(), torch.ones(2, 3).bfloat16()).to_numpy()
    assert half["features"].dtype == np.float32, "numpy has no bfloat16"


def test_plain_values_go_through_json_and_back():
    prediction = regressed()
    values = json.loads(json.dumps(prediction.to_dict(), allow_nan=False))
    assert values["kind"] == "RegressionPrediction"
    assert values["predictor"] is None
    for name in ("mean", "std", "total", "aleatoric", "epistemic"):
        assert values[name] == getattr(prediction, name).tolist(), name
    broken = RegressionPrediction(torch.tensor([1.0, torch.nan]), torch.tensor([torch.inf, 1.0]), torch.zeros(2))
    values = json.loads(json.dumps(broken.to_dict(), allow_nan=False))
    assert values["mean"] == [1.0, None]
    assert values["aleatoric"] == [None, None]
    nested = classified(extra=(2,)).to_dict()
    assert np.shape(nested["probs"]) == (3, 2, 4)


def test_a_table_of_classes_has_a_row_for_each_example():
    prediction = classified()
    table = prediction.to_pandas()
    assert list(table.columns) == [
        *("label", "confidence", "total", "aleatoric", "epistemic", "probs_0", "probs_1", "probs_2", "probs_3")
    ]
    assert table.index.name == "example"
    np.testing.assert_array_equal(table[[f"probs_{c}" for c in range(4)]], prediction.probs)
    for name in ("label", "confidence", "total", "aleatoric", "epistemic"):
        np.testing.assert_array_equal(table[name], getattr(prediction, name), err_msg=name)
    named = prediction.to_pandas(class_names=["a", "b", "c", "d"])
    assert named["label"].tolist() == ["abcd"[index] for index in prediction.label]
    np.testing.assert_array_equal(named["probs_c"], prediction.probs[:, 2])
    with pytest.raises(ValueError, match="2 class_names for 4 classes"):
        prediction.to_pandas(class_names=["a", "b"])


def test_a_table_of_positions_has_a_row_for_each():
    prediction = Bernoulli().from_samples(torch.randn(6, 3, 5, dtype=F64))
    table = prediction.to_pandas()
    assert table.index.names == ["example", "position"]
    assert table.loc[(2, 4), "probs_1"] == prediction.probs[2, 4, 1].item()
    pixels = classified(extra=(2, 3)).to_pandas()
    assert pixels.index.names == ["example", "position_1", "position_2"]
    assert len(pixels) == 18


def test_a_table_of_numbers_has_intervals():
    prediction = regressed((3, 2))
    table = prediction.to_pandas(level=0.8)
    assert list(table.columns) == ["mean", "std", "low", "high", "aleatoric", "epistemic"]
    mean, std = prediction.mean.numpy().reshape(-1), np.sqrt(prediction.variance.numpy().reshape(-1))
    low, high = stats.norm(mean, std).interval(0.8)
    np.testing.assert_allclose(table["low"], low, rtol=1e-12)
    np.testing.assert_allclose(table["high"], high, rtol=1e-12)
    features = FeaturePrediction(torch.arange(6.0).view(2, 3), torch.ones(2, 3)).to_pandas()
    assert features.loc[1, "features_2"] == 5
    assert features.loc[1, "epistemic"] == 3


@pytest.mark.parametrize("extra", [(), (2,)])
def test_a_table_without_rows_has_its_columns(extra):
    classes = Categorical(class_dim=-1).from_samples(torch.zeros(2, 0, *extra, 3)).to_pandas()
    assert len(classes) == 0
    assert list(classes.columns)[-3:] == ["probs_0", "probs_1", "probs_2"]
    numbers = Gaussian(1.0).from_samples(torch.zeros(2, 0, *extra)).to_pandas()
    assert list(numbers.columns) == ["mean", "std", "low", "high", "aleatoric", "epistemic"]
    assert len(numbers) == 0


def test_class_names_that_are_alike_do_not_lose_a_column():
    with pytest.raises(ValueError, match=r"names of their own.*\['a', 'a', 'b', 'c'\]"):
        classified().to_pandas(class_names=["a", "a", "b", "c"])


def test_a_table_of_short_numbers_has_intervals():
    one = torch.ones(2, dtype=torch.bfloat16)
    table = RegressionPrediction(one, one, 0 * one).to_pandas()
    np.testing.assert_allclose(table["high"], 1 + 1.96, rtol=0.01)


def test_one_class_or_feature_is_a_column_with_a_number():
    features = FeaturePrediction(torch.tensor([[4.0]]), torch.ones(1, 1)).to_pandas()
    assert list(features.columns) == ["epistemic", "features_0", "variance_0"]


def test_without_pandas_a_sentence_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install pandas\. to_numpy\(\)"):
        regressed().to_pandas()


# -- what a person reads ------------------------------------------------------------------------------------------


def test_text_says_what_it_is():
    prediction = classified(rows=7)
    lines = repr(prediction).splitlines()
    assert lines[0] == "ClassificationPrediction of 7 examples, 4 classes"
    assert f"epistemic {prediction.epistemic.mean():.3f}" in lines[1]
    assert lines[2].split() == ["example", "label", "confidence", "total", "aleatoric", "epistemic"]
    assert lines[4].split()[:3] == ["1", str(prediction.label[1].item()), f"{prediction.confidence[1]:.3f}"]
    assert lines[-1] == "..."
    assert len(lines) == 9
    assert not repr(prediction[:5]).endswith("...")
    assert repr(prediction[:1]).startswith("ClassificationPrediction of 1 example, 4 classes")
    assert repr(prediction[:0]) == "ClassificationPrediction of 0 examples, 4 classes"


def test_text_of_positions_and_of_tensors_without_values():
    text = repr(classified(rows=2, extra=(2, 2)))
    assert text.startswith("ClassificationPrediction of 2 examples of 2 x 2 positions, 4 classes")
    assert "1, 0" in text.splitlines()[5]
    empty = repr(regressed()._map(lambda _, tensor: tensor.to("meta")))
    assert empty == "RegressionPrediction(mean (3,), aleatoric (3,), epistemic (3,))"


def test_html_is_escaped():
    one = torch.ones(2)
    html = RegressionPrediction(one, one, one, predictor="<script>&")._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;&amp;" in html
    assert html.count("<tr>") == 3
    assert "<td>1.414</td>" in html


# -- figures ------------------------------------------------------------------------------------------------------


def test_bars_are_the_most_probable_classes():
    prediction = classified(keep_samples=True)
    (axes,) = prediction.plot(1, class_names=["a", "b$", "c", "d"], top=3).axes
    order = prediction.probs[1].argsort(descending=True)[:3]
    np.testing.assert_allclose([bar.get_width() for bar in axes.patches], prediction.probs[1][order])
    assert [text.get_text() for text in axes.get_yticklabels()] == [["a", r"b\$", "c", "d"][i] for i in order]
    (dots,) = axes.collections
    np.testing.assert_allclose(dots.get_offsets()[:, 0].reshape(6, 3), prediction.samples[:, 1, order])
    assert f"epistemic {prediction.epistemic[1]:.3f} nats" in axes.get_title()
    assert not classified().plot().axes[0].collections


def test_the_curve_is_the_density():
    prediction = regressed((3, 2), keep_samples=True)
    (axes,) = prediction.plot((-1, 1), level=0.5).axes
    x, density = axes.lines[0].get_data()
    expected = stats.norm(prediction.mean[2, 1].item(), prediction.std[2, 1].item())
    np.testing.assert_allclose(density, expected.pdf(x), rtol=1e-6)
    np.testing.assert_allclose(axes.lines[2].get_xdata(), prediction.samples[:, 2, 1])
    low, high = expected.interval(0.5)
    assert f"50 % from {low:.3f} to {high:.3f}" in axes.get_title()


def test_a_figure_goes_where_it_is_asked_to():
    matplotlib = pytest.importorskip("matplotlib.figure")
    figure = matplotlib.Figure()
    left, right = figure.subplots(1, 2)
    assert regressed().plot(0, ax=right) is figure
    assert right.lines
    assert not left.lines
    still = RegressionPrediction(torch.ones(1), torch.zeros(1), torch.zeros(1)).plot()
    assert still.axes[0].lines[0].get_xdata()[0] == 1, "without variance a mean is left"


def test_maps_are_drawn_as_pictures():
    torch.manual_seed(0)
    prediction = Categorical().from_samples(torch.randn(3, 2, 4, 5, 6))
    figure = prediction.plot(-1)
    answer, aleatoric, epistemic = (axes.images[0].get_array() for axes in figure.axes[:3])
    np.testing.assert_array_equal(answer, prediction.label[1])
    np.testing.assert_allclose(aleatoric, prediction.aleatoric[1], rtol=1e-6)
    np.testing.assert_allclose(epistemic, prediction.epistemic[1], rtol=1e-6)
    assert figure.axes[1].get_title() == f"aleatoric, on average {prediction.aleatoric[1].mean():.3g}"
    numbers = Gaussian(0.5).from_samples(torch.randn(3, 2, 4, 5))
    np.testing.assert_allclose(numbers.plot(0).axes[0].images[0].get_array(), numbers.mean[0], rtol=1e-6)
    assert len(prediction.plot((0, 1, 2)).axes) == 1  # one place, as before
    with pytest.raises(IndexError):
        prediction.plot(2)


def test_what_cannot_be_drawn_says_so(monkeypatch):
    with pytest.raises(ValueError, match=r"index=0 does not name one prediction: .*takes 2 whole numbers"):
        regressed((3, 2)).plot(0)
    with pytest.raises(IndexError, match="no prediction at 3"):
        regressed().plot(3)
    with pytest.raises(ValueError, match="no figure of a FeaturePrediction"):
        FeaturePrediction(torch.ones(2, 3), torch.ones(2, 3)).plot()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"bayesify\[report\]"):
        regressed().plot()
