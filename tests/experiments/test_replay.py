"""Predictions beside measured steps: of a file made by hand, against closed forms."""

import json

import pytest
import torch

from gradwire.compress import Ranks
from gradwire.ddp_core.overlap.replay import priority_order, replay
from gradwire.ddp_core.overlap.step_model import layered
from gradwire.experiments.cli import main
from gradwire.experiments.replay.picture import forward_spans
from gradwire.experiments.workloads.emulation import cost_on, load_trace, predicted
from gradwire.hooks.slices import wire_mb

GBIT = 1e9 / 8


def row(order="backward", seconds=3.4, **changed):
    return {
        "world_size": 4,
        "ddp": "gradwire",
        "compressor": "none",
        "bucket_mb": None,
        "slice_mb": None if order == "backward" else 2.0,
        "sync_every": 1,
        "overlap": True,
        "order": order,
        "measurements": {"sec_per_iter": {"p50": seconds}},
        "phases": {"optimizer": 0.0},
        "stretch": 1.0,
        **changed,
    }


@pytest.fixture
def file(tmp_path):
    """Write a file of the benchmark."""

    def write(*rows, **changed):
        config = {"compute": "emulate:resnet50", "dilate": 10, "link": "4gbit", "netlab": {"rate": "0"}, **changed}
        path = tmp_path / "bench.json"
        path.write_text(json.dumps({"config": config, "rows": list(rows)}))
        return str(path)

    return write


@pytest.fixture
def replayed(capsys):
    """What `gradwire replay --json` prints."""

    def get(*arguments):
        capsys.readouterr()
        assert main(["replay", *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return get


def test_each_measured_row_stands_beside_its_prediction_in_undilated_seconds(replayed, file):
    found = replayed(file(row(), row("priority", 3.1), row("slices", sync_every=2)))
    backward, priority = found["measured"]
    for each in (backward, priority):
        assert (each["gbit"], each["hosts"], each["compressor"]) == (4, 4, "none")
        assert each["bound"] == pytest.approx(0.307, abs=1e-3)
        assert each["synchronous_bound"] == pytest.approx(0.339, abs=1e-3)
        assert each["error"] == pytest.approx(each["predicted"] / each["measured"] - 1)
    assert (backward["measured"], priority["measured"]) == pytest.approx((0.34, 0.31))
    assert backward["predicted"] == pytest.approx(0.339, rel=0.03)
    assert priority["predicted"] == pytest.approx(0.307, rel=0.01)


def test_what_the_optimizer_took_comes_behind_the_replayed_step(replayed, file):
    with_it = replayed(file(row(phases={"optimizer": 0.5})))["measured"][0]["predicted"]
    assert with_it == pytest.approx(replayed(file(row()))["measured"][0]["predicted"] + 0.05)


@pytest.mark.parametrize("order", ["backward", "priority"])
def test_what_this_machine_adds_to_computation_is_in_the_prediction_and_in_its_own_bound(replayed, file, order):
    """A link of 1 Tbit/s, so that computation is all: the trace's 0.097 s, stretched, and the optimizer's 0.005."""
    slow = row(order, stretch=1.2, phases={"optimizer": 0.05})
    found = replayed(file(slow, link="1000gbit"))["measured"][0]
    assert found["bound"] == pytest.approx(0.097, rel=1e-3)
    assert found["predicted"] == pytest.approx(found["bound_here"], rel=0.01)
    assert found["bound_here"] == pytest.approx(1.2 * 0.097 + 0.005, rel=1e-3)


def test_the_slower_of_link_and_lab_counts(replayed, file):
    lab = replayed(file(row(), link=None, netlab={"rate": "2gbit"}))["measured"][0]
    assert lab["gbit"] == 2
    assert replayed(file(row(), netlab={"rate": "2gbit"}))["measured"] == [lab]


def test_on_paper_there_are_all_orders_for_each_number_of_hosts_once(replayed, file):
    paper = replayed(file(row(), row("priority")), "--hosts=1,16,1024", "--latency=0")["predicted"]
    assert [each["hosts"] for each in paper] == [1, 16, 1024]
    for each in paper:
        assert each["bound"] <= each["priority"] + 1e-9 <= each["slices"] + 2e-9
    assert paper[0]["bound"] == pytest.approx(0.097)
    wire = 2 * 15 / 16 * 4 * load_trace("resnet50").elements / (4 * GBIT)
    assert paper[1]["bound"] == pytest.approx(wire, rel=1e-3)


def test_latency_counts_once_for_each_hop_of_each_collective():
    assert cost_on(1024, 4 * GBIT, 1e-5).alpha == pytest.approx(20e-5)
    assert cost_on(5, 4 * GBIT, 1e-5).alpha == pytest.approx(6e-5)
    assert cost_on(1, 0, 1e-5).seconds(100) == 0
    trace = load_trace("resnet50")
    fast, slow = (predicted(trace, "none", 4, cost_on(4, GBIT, each), "slices", bucket_mb=1) for each in (0, 1e-3))
    pieces = 130  # of a MiB or a little less or more: fewer than so many
    assert 20 * 4e-3 < slow - fast < pieces * 4e-3


def test_auto_is_priority_where_that_promises_three_percent_and_slices_elsewhere():
    trace = load_trace("resnet50")
    slow, fast = (cost_on(4, rate * GBIT, 0) for rate in (4, 400))
    assert predicted(trace, "none", 4, slow, "auto") == predicted(trace, "none", 4, slow, "priority")
    assert predicted(trace, "none", 4, fast, "auto") == predicted(trace, "none", 4, fast, "slices")


def test_without_json_there_are_tables_and_the_error(capsys, file):
    assert main(["replay", file(row())]) == 0
    shown = capsys.readouterr().out
    for told in ("predicted beside measured", "error of the prediction: median", "on paper", "1024"):
        assert told in shown


def test_a_picture_is_drawn_of_the_first_row(file, tmp_path, capsys):
    assert main(["replay", file(row()), "--picture", str(tmp_path / "steps.png")]) == 0
    assert (tmp_path / "steps.png").stat().st_size > 10_000


def test_what_forward_computes_between_its_waits_is_all_of_it_and_ends_with_the_step():
    model = layered([(1.0, 2.0, 3.0), (2.0, 4.0, 5.0), (1.0, 1.0, 0.5)])
    for until_needed in (True, False):
        found = replay(model, priority_order(model), until_needed=until_needed)
        spans = list(forward_spans(model, found, until_needed=until_needed))
        assert sum(seconds for _, seconds in spans) == pytest.approx(model.forward)
        assert sum(spans[-1]) == pytest.approx(found.step)
        assert spans[0][0] >= model.backward


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "files is empty"),
        (["nowhere.json"], "nowhere.json is no file of gradwire bench --json"),
        (["FILE", "--hosts=0"], "hosts are at least 1, got 0"),
        (["FILE", "--latency=-1"], "latency is at least 0 seconds"),
    ],
)
def test_what_cannot_be_replayed_is_refused(arguments, message, file, capsys):
    path = file(row())
    assert main(["replay", *(path if each == "FILE" else each for each in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_files_of_real_computation_and_of_torchs_ddp_alone_are_refused(file, capsys):
    for rows, changed, message in [
        (row(), {"compute": "real"}, "without an emulated accelerator"),
        (row(ddp="torch"), {}, "no row of gradwire's DistributedDataParallel"),
    ]:
        assert main(["replay", file(rows, **changed)]) == 2
        assert message in capsys.readouterr().err


def test_slices_are_as_large_as_the_file_tells(replayed, file):
    told, smaller = (
        replayed(file(row("priority", 0.1, compressor="topk:ratio=0.01", slice_mb=size)))["measured"][0]["predicted"]
        for size in (2.0, 0.25)
    )
    assert told > smaller


@pytest.mark.parametrize("spec", ["none", "int8", "topk:ratio=0.01", "powersgd:rank=4"])
def test_what_a_file_tells_of_slices_cuts_as_their_default_does(spec):
    trace, cost = load_trace("resnet50"), cost_on(4, GBIT, 0)
    parameters = [torch.empty(shape, device="meta") for shape in trace.parameters.values()]
    chosen, told = (
        predicted(trace, spec, 4, cost, "priority", bucket_mb=size)
        for size in (None, wire_mb(spec, Ranks(4), parameters))
    )
    assert chosen == told
