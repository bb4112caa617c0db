from xml.etree import ElementTree

import matplotlib
import torch

from bayesify.evaluation.report._figures import _wilson, new_figure, thinned
from bayesify.evaluation.report.drawing import SETTINGS, to_svg


def drawn(key):
    with matplotlib.rc_context(SETTINGS):
        figure = new_figure(2, 2)
        axes = figure.add_subplot()
        axes.plot([0, 1], [0, 1], "o-", color="#123")
        axes.set_title('a "quoted" <name> id="x" $1$')
        return to_svg(figure, key, "a label & more")


def test_drawings_share_no_id_and_keep_their_references():
    first, second = (ElementTree.fromstring(drawn(key)) for key in ("one", "two"))
    ids = [{node.get("id") for node in root.iter() if node.get("id")} for root in (first, second)]
    assert ids[0]
    assert not ids[0] & ids[1]
    for root, own in zip((first, second), ids, strict=True):
        links = [node.get("href")[1:] for node in root.iter() if node.get("href")]
        clips = [node.get("clip-path")[5:-1] for node in root.iter() if node.get("clip-path")]
        assert links
        assert clips
        assert {*links, *clips} <= own


def test_text_stays_text_and_colours_stay_colours():
    root = ElementTree.fromstring(drawn("one"))
    assert 'a "quoted" <name> id="x" $1$' in {node.text for node in root.iter("text")}
    assert any("#112233" in (node.get("style") or "") for node in root.iter())
    assert root.get("aria-label") == "a label & more"
    assert not {"metadata", "style"} & {node.tag for node in root.iter()}


def test_wilson_interval_has_its_known_ends():
    low, high = _wilson(torch.tensor([0.0, 0.5]).numpy(), torch.tensor([10.0, 100.0]).numpy())
    assert abs(high[0] - 0.2775) < 1e-4  # z^2 / (n + z^2)
    assert low[0] == 0
    assert abs(low[1] - 0.4038) < 1e-4
    assert abs(high[1] - 0.5962) < 1e-4


def test_long_curves_keep_both_ends():
    kept = thinned(torch.arange(1001))
    assert len(kept) == 200
    assert (kept[0], kept[-1]) == (0, 1000)
    assert thinned(torch.arange(5)).tolist() == [0, 1, 2, 3, 4]
