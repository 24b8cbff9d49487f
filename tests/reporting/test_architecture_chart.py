"""The heat map of what a method has learned, in the report of a run from training to derivation."""

import json
import re

import pytest

from greedynas.reporting.architecture_chart import architecture_charts
from greedynas.reporting.facts import Training, read_facts
from greedynas.reporting.report import draw_charts, write_report
from tests.helpers.report_runs import searched, trained

pytestmark = pytest.mark.usefixtures("one_thread")


def test_probabilities_over_time_and_the_derived_network(photos, tmp_path):
    run = trained(tmp_path / "run", photos, sampler="proxyless", warmup=2, max_epochs=3)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    learned = [row["probabilities"] for row in rows if row["kind"] == "epoch"]
    assert len(learned) == 3
    assert learned[0] != learned[-1]
    search = searched(run, searcher=None, macs=(["40K"], None))
    assert (search["name"], search["searcher"], len(search["found"])) == ("macs-40K", "derivation", 1)
    assert search["chosen"]["macs"] <= 40_000
    charts = draw_charts(read_facts(run))
    heat = charts["architecture"].figure.data[0]
    assert list(heat.x) == [1, 2, 3]
    assert [list(row) for row in heat.z] == [
        [round(epoch[i][j], 4) for epoch in learned] for i in range(4) for j in range(3)
    ]
    page = write_report(run).read_text()
    assert "Probabilities of ops" in page
    text = " ".join(re.sub("<[^>]+>", " ", page).split())
    assert "It is the most probable path within it by the probabilities that proxyless has learned" in text


def test_no_chart_without_probabilities(photos, tmp_path):
    run = trained(tmp_path / "run", photos, max_epochs=1)
    facts = read_facts(run)
    assert architecture_charts(facts.training, facts.space) == {}
    assert architecture_charts(Training((), (), ()), facts.space) == {}
    with pytest.raises(Exception, match="derivation"):
        searched(run, searcher="derivation", macs=(["40K"], None))
