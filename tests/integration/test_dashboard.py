"""The dashboard and the page on metrics are about what a real replica tells, all of it and nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from certificates import issue
from prometheus_client.metrics_core import Metric
from quorum_threads import lighthouse, loopback_transport, make_manager
from scrapes import families, metrics_url

from ft_transport import CheckpointStore, Publisher

_DOCS = Path(__file__).parents[2] / "docs"
_DASHBOARD = json.loads((_DOCS / "grafana-dashboard.json").read_text())
_PAGE = (_DOCS / "metrics.md").read_text()
_CONFIGURATIONS = re.findall(r"```yaml\n(.*?)```", _PAGE, re.DOTALL)
_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
_ROWS = ["Job", "Recovery", "Lock and snapshot costs", "Transfers", "Checkpoints", "Publishing", "Metrics themselves"]
_OWN_LABELS = {"instance", "le"}

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's package prometheus")


def _panels() -> Iterator[dict[str, Any]]:
    return (panel for panel in _DASHBOARD["panels"] if panel["type"] != "row")


def _expressions() -> list[str]:
    return [target["expr"] for panel in _panels() for target in panel["targets"]]


def _documented() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Type and labels of each metric in the tables of the page."""
    lines = [line for line in _PAGE.splitlines() if line.startswith("| `ft_transport_")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert {len(row) for row in rows} == {5}
    assert len({row[0] for row in rows}) == len(rows)
    return {name.strip("`"): (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _, _ in rows}


def _promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, quorum_ready: None) -> dict[str, Metric]:
    """By its full name, what a replica with a quorum, a store and a publisher tells."""
    transport = loopback_transport()
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lighthouse() as address:
        manager = make_manager(
            address,
            "told",
            checkpoint_transport=transport,
            checkpoint_store=CheckpointStore(tmp_path_factory.mktemp("checkpoints")),
            keep_every=10,
        )
        try:
            manager.register("model", model)
            manager.register("optimizer", optimizer)
            manager.attach(optimizer)
            manager.start_quorum()
            model(torch.ones(4)).sum().backward()
            assert manager.should_commit()
            optimizer.step()
            root = tmp_path_factory.mktemp("versions")
            with Publisher((), root, transport=transport) as publisher:
                publisher.publish(1, {"w": torch.ones(4)}).result()
                found = families(transport)
        finally:
            manager.shutdown()
    return {f"ft_transport_{name}{'_total' if each.type == 'counter' else ''}": each for name, each in found.items()}


def test_the_page_tells_of_every_metric_and_of_no_other(told: dict[str, Metric]) -> None:
    documented = _documented()
    assert {name: kind for name, (kind, _) in documented.items()} == {name: each.type for name, each in told.items()}
    for name, each in told.items():
        for sample in each.samples:
            assert set(sample.labels) - _OWN_LABELS == set(documented[name][1]), name


def test_names_have_one_prefix_and_base_units(told: dict[str, Metric]) -> None:
    for name, each in told.items():
        assert name.startswith("ft_transport_")
        assert name.endswith("_total") == (each.type == "counter")
        assert not re.search(r"_(ms|milliseconds|kb|mb|gb|minutes|percent)(_|$)", name)
        if each.type == "histogram":
            assert name.endswith("_seconds")
        assert re.fullmatch(r"[A-Z0-9].*\.", each.documentation), name


def test_the_dashboard_asks_for_what_is_told(told: dict[str, Metric]) -> None:
    names = {name.removesuffix("_total") + suffix for name, each in told.items() for suffix in _SUFFIXES[each.type]}
    asked = set(re.findall(r"ft_transport_\w+", json.dumps(_DASHBOARD)))
    assert asked <= names, asked - names
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    # All of it can be seen there.
    assert {name for name in told if name not in shown} == set()


def test_the_dashboard_groups_and_matches_by_labels_that_there_are() -> None:
    documented = _documented()
    for panel in _panels():
        for target in panel["targets"]:
            expression = target["expr"]
            names = [re.sub(r"_(bucket|sum|count)$", "", each) for each in re.findall(r"ft_transport_\w+", expression)]
            labels = _OWN_LABELS.union(*(documented[name][1] for name in names))
            for group in re.findall(r"by \(([^)]*)\)", expression):
                assert set(group.split(", ")) <= labels, expression
            for matchers in re.findall(r"\{([^}]*)\}", expression):
                assert set(re.findall(r"(\w+)=", matchers)) <= labels, expression
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels, target


def test_the_dashboard_has_its_rows_and_asks_for_data_source_replica_and_instance() -> None:
    assert [panel["title"] for panel in _DASHBOARD["panels"] if panel["type"] == "row"] == _ROWS
    variables = {each["name"]: each for each in _DASHBOARD["templating"]["list"]}
    assert variables.keys() == {"datasource", "replica", "instance"}
    assert variables["datasource"]["type"] == "datasource"
    for panel in _panels():
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            assert 'instance=~"$instance"' in target["expr"]


@needs_promtool
def test_prometheus_understands_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    expressions = [each.replace("$__rate_interval", "1m").replace("$instance", ".*") for each in _expressions()]
    rules = [{"record": f"shown:{number}", "expr": each} for number, each in enumerate(expressions)]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    _promtool("check", "rules", str(path))


@needs_promtool
@pytest.mark.parametrize("configuration", _CONFIGURATIONS, ids=["open", "token", "tls"])
def test_prometheus_takes_the_configurations_of_the_page(configuration: str, tmp_path: Path) -> None:
    issued = issue(tmp_path / "issued").files
    for source, name in ((issued.authority, "ca.crt"), (issued.certificate, "tls.crt"), (issued.key, "tls.key")):
        shutil.copy(source, tmp_path / f"ft-{name}")
    (tmp_path / "ft-watch-token").write_text("token")
    (tmp_path / "ft-transport").mkdir()
    (tmp_path / "ft-transport" / "a.json").write_text('[{"targets": ["127.0.0.1:1"]}]')
    path = tmp_path / "prometheus.yml"
    path.write_text(configuration.replace("/etc/prometheus", str(tmp_path)))
    _promtool("check", "config", str(path))


@needs_promtool
def test_prometheus_finds_nothing_amiss_in_what_is_told(tmp_path: Path) -> None:
    """Its linter knows the conventions for names, types and help."""
    transport = loopback_transport()
    try:
        with urlopen(metrics_url(transport), timeout=20) as answer:
            text = answer.read()
    finally:
        transport.shutdown()
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
