"""Pictures and tables of results: they exist, show the right numbers, and reject bad input."""

import json
from xml.etree import ElementTree

import pytest

from radixkv_traces.cli import main
from radixkv_traces.plots import hit_rate, hits, occupancy, ttft
from radixkv_traces.saved_results import read

ROWS = [
    {
        "policy": policy,
        "capacity": f"{blocks} blocks",
        "capacity_blocks": blocks,
        "token_hit_rate": rate,
        "occupancy": [[1.0, blocks // 2], [2.0, blocks]],
        "hit_rates": [[1.0, 0.0], [2.0, rate]],
    }
    for policy, rates in {"lru": (0.1, 0.3), "clairvoyant": (0.2, 0.4)}.items()
    for blocks, rate in zip((10, 100), rates, strict=True)
]
SIMULATION = {"trace": "t", "unique_blocks": 1000, "infinite_token_hit_rate": 0.45, "rows": ROWS}
REQUESTS = """\
run,number,session,warmup,due_s,sent_s,ttft_ms,tpot_ms,e2e_ms,prompt_tokens,cached_tokens,output_tokens,preemptions,error
ours,0,a,1,0,0,900,1,1000,100,0,2,0,
ours,1,a,0,0,0,100,1,110,100,0,2,0,
ours,2,a,0,1,1,20,1,30,100,90,2,0,
ours,3,b,0,2,2,,,,,,,,RequestFailed: no
ours,4,b,0,3,3,40,1,50,100,50,2,0,
"""
MOMENTS = """\
run,at,used_blocks,cached_blocks,num_blocks,running,waiting,prompt_tokens,cached_tokens
ours,0.0,0,0,50,0,0,0,0
ours,0.5,30,10,50,2,0,100,0
"""


@pytest.fixture
def simulation(tmp_path):
    path = tmp_path / "sim.json"
    path.write_text(json.dumps(SIMULATION))
    return str(path)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps({"trace": "t", "runs": {"ours": {}}}))
    (folder / "requests.csv").write_text(REQUESTS)
    (folder / "moments.csv").write_text(MOMENTS)
    return str(folder)


def lines(axis):
    """The points of each labelled line."""
    return {line.get_label(): [tuple(point) for point in line.get_xydata().tolist()] for line in axis.get_lines()}


def test_hit_rate_is_drawn_against_the_share_of_unique_blocks(simulation):
    (axis,) = hit_rate(read(simulation)).axes
    drawn = lines(axis)
    assert drawn["lru"] == [(1.0, 0.1), (10.0, 0.3)]
    assert drawn["clairvoyant"] == [(1.0, 0.2), (10.0, 0.4)]
    assert drawn["infinite pool"][0][1] == 0.45
    assert axis.xaxis.get_major_formatter()(10) == "10%"
    assert set(axis.xaxis.get_minor_formatter().format_ticks([2, 3])) == {""}


def test_a_runs_pictures_leave_out_warm_up_and_failures(run):
    found = read(run)
    (axis,) = ttft(found).axes
    labels = [line.get_label() for line in axis.get_lines()]
    assert labels == ["hit (2)", "miss (1)"]
    assert lines(axis)["hit (2)"] == [(20.0, 0.0), (20.0, 0.5), (40.0, 1.0)]
    assert lines(axis)["miss (1)"] == [(100.0, 0.0), (100.0, 1.0)]
    (axis,) = hits(found).axes
    assert lines(axis)["ours"] == [(0.0, 0.0), (1.0, 0.45), (3.0, pytest.approx(140 / 300))]
    (axis,) = occupancy(found).axes
    assert axis.get_lines()[0].get_ydata()[0] == 50.0


@pytest.mark.long
def test_every_file_is_there_and_the_same_each_time(simulation, run, tmp_path, capsys):
    outs = [tmp_path / "one", tmp_path / "two"]
    for out in outs:
        assert main(["report", simulation, run, "--out", str(out)]) == 0
    names = {path.name for path in outs[0].iterdir()}
    assert names == {
        *(f"1-sim-{name}" for name in ("rows.csv", "summary.json")),
        *(f"1-sim-{name}.{kind}" for name in ("hit_rate", "hits_over_time", "occupancy") for kind in ("svg", "png")),
        "2-run-summary.json",
        *(f"2-run-{name}.{kind}" for name in ("ttft", "hits_over_time", "occupancy") for kind in ("svg", "png")),
    }
    for name in names:
        assert (outs[0] / name).read_bytes() == (outs[1] / name).read_bytes(), name
    for path in outs[0].glob("*.svg"):
        ElementTree.parse(path)
    assert str(outs[1] / "1-sim-hit_rate.svg") in capsys.readouterr().out.splitlines()
    assert (outs[0] / "1-sim-rows.csv").read_text().splitlines()[:2] == [
        "policy,capacity,capacity_blocks,token_hit_rate",
        "lru,10 blocks,10,0.1",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "no JSON"),
        ("[]", "a JSON list"),
        ("{}", "simulate --json"),
        ('{"rows": [{"policy": "lru"}]}', "simulate --json"),
        ('{"rows": []}', "no rows"),
    ],
)
def test_what_is_no_result_is_named(tmp_path, capsys, content, message):
    path = tmp_path / "found.json"
    if content is not None:
        path.write_text(content)
    assert main(["report", str(path), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert str(path) in said
    assert not (tmp_path / "out").exists()


def test_without_matplotlib_it_says_what_to_install(simulation, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "radixkv_traces.plots", None)
    assert main(["report", simulation, "--out", str(tmp_path)]) == 2
    assert "pip install 'radixkv[plots]'" in capsys.readouterr().err
