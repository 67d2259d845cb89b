"""The bars for an H200, and whether the results meet them: met, missed or unmeasured.

A bar over several cases is judged by the worst of them. It is unmeasured if one case has no number, because a good case
must not stand for one that failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .result import Row
from .shapes import BAR_BATCH, BAR_CONTEXT, BAR_TREE, LLAMA_8B, Sizes, shared

Parts = dict[str, list[Row]]


@dataclass(frozen=True)
class Bar:
    """One promise: `value` is compared with `target`, from above if `at_most`, else from below."""

    name: str
    says: str
    part: str
    target: float
    at_most: bool
    field: str
    chosen: Callable[[Row], bool]
    least: int  # cases that it has to be measured at

    def judge(self, parts: Parts) -> Row:
        """Return the state, and the worst value with its case, or the reason why there is none."""
        known: Row = {"name": self.name, "says": self.says, "target": self.target, "at_most": self.at_most}
        rows = [row for row in parts.get(self.part, []) if self.chosen(row)]
        without = [row for row in rows if row.get(self.field) is None]
        if len(rows) < self.least or without:
            return known | {"state": "unmeasured", "why": self._missing(parts, rows, without)}
        worst = (max if self.at_most else min)(rows, key=lambda row: row[self.field])
        value = worst[self.field]
        met = value <= self.target if self.at_most else value >= self.target
        return known | {"state": "met" if met else "missed", "found": value, "case": _case(worst), "cases": len(rows)}

    def _missing(self, parts: Parts, rows: list[Row], without: list[Row]) -> str:
        for row in without:
            if reason := row.get("failed") or row.get("skipped"):
                return f"{_case(row)}: {reason}"
        if without:
            return f"{_case(without[0])} has no {self.field}"
        reasons = [row.get("failed") or row.get("skipped") for row in parts.get(self.part, [])]
        found = next((reason for reason in reasons if reason), "")
        return f"{len(rows)} of {self.least} cases were measured" + (f" ({found})" if found else "")


def _case(row: Row) -> str:
    """Return the name of a row's case."""
    extra = [str(row[name]) for name in ("shape", "layout", "mode", "peer") if row.get(name)]
    return ", ".join([str(row.get("case", "?")), *extra])


def bars(sizes: Sizes) -> list[Bar]:
    """Return all bars for measurements at these sizes."""
    shapes, peers = len(sizes.shapes), len(sizes.peers)
    tree = shared(*BAR_TREE).name

    def decode(row: Row) -> bool:
        return row.get("layout") in ("paged", None) and row["batch"] == BAR_BATCH and row["context"] == BAR_CONTEXT

    def tree_8b(row: Row) -> bool:
        return row["case"] == tree and row.get("mode") != "flat" and row["shape"] == LLAMA_8B.name

    def layer(row: Row) -> bool:
        return row.get("what") == "decode step, a layer"

    def first(row: Row) -> bool:
        return row["case"].endswith("after the load")

    def of_peer(name: str, kind: str) -> Callable[[Row], bool]:
        return lambda row: row.get("peer", "").startswith(name) and row.get("kind", kind) == kind

    return [
        Bar(
            "decode_bandwidth",
            f"decode at {BAR_BATCH} x 8k reads at 85% of the read ceiling or more, at every head shape",
            "decode",
            0.85,
            False,
            "share",
            decode,
            shapes,
        ),
        Bar(
            "paged",
            "paged block tables cost at most 5% over contiguous ones, in any decode",
            "paged",
            1.05,
            True,
            "paged_over_contiguous",
            lambda _: True,
            len(sizes.decodes()),
        ),
        Bar(
            "tree_us",
            "decode along the tree takes 60 us a layer or less for 64 x (8k shared + 512), Llama-3-8B",
            "tree",
            60.0,
            True,
            "us",
            tree_8b,
            1,
        ),
        Bar("tree_speedup", "and is 5 times as fast as flat or more", "tree", 5.0, False, "speedup", tree_8b, 1),
        Bar(
            "flashinfer_decode",
            "decode is as fast as FlashInfer's or faster, whichever of its ways is fastest",
            "best_flashinfer",
            1.0,
            False,
            "ratio",
            of_peer("FlashInfer decode", "decode"),
            peers * shapes,
        ),
        Bar(
            "flashinfer_cascade",
            "decode along the tree is as fast as FlashInfer's cascade or faster",
            "peers",
            1.0,
            False,
            "ratio",
            of_peer("FlashInfer cascade", "tree"),
            2 * shapes,
        ),
        Bar(
            "vllm",
            "decode is 1.2 times as fast as vLLM's Triton kernel or more",
            "peers",
            1.2,
            False,
            "ratio",
            of_peer("vLLM Triton", "decode"),
            peers * shapes,
        ),
        Bar(
            "sglang",
            "decode is 1.2 times as fast as SGLang's Triton kernel or more",
            "peers",
            1.2,
            False,
            "ratio",
            of_peer("SGLang Triton", "decode"),
            peers * shapes,
        ),
        Bar(
            "chunks",
            "chunks reach 65% of the rate of torch's attention over contiguous KV, or more",
            "chunks",
            0.65,
            False,
            "of_sdpa",
            lambda _: True,
            len(sizes.new) * len(sizes.cached),
        ),
        Bar(
            "engine_step",
            "a decode step of the engine takes 1.25 times its floor or less",
            "engine",
            1.25,
            True,
            "of_floor",
            lambda row: row["case"].startswith("step") and row.get("mode") != "flat",
            3,
        ),
        Bar(
            "launches", "a layer of a decode step takes at most 11 kernels", "profiles", 11, True, "launches", layer, 1
        ),
        Bar("stalls", "none of the first steps takes five times the median", "engine", 0, True, "stalls", first, 1),
        Bar(
            "eager_steps",
            "every step of the first ones and of a tree of five levels is replayed from a graph",
            "engine",
            0,
            True,
            "eager_steps",
            lambda row: first(row) or row["case"].startswith("comb"),
            2,
        ),
        Bar(
            "penalties",
            "a step whose rows all have penalties or top-p takes 1.1 times a greedy one or less",
            "engine",
            1.1,
            True,
            "over_greedy",
            lambda row: row["case"].startswith("sampling") and row.get("mode") != "greedy",
            2,
        ),
    ]


def judge(parts: dict[str, Any], sizes: Sizes, *, smoke: bool = False) -> list[Row]:
    """Judge every bar by the parts of a result; a smoke test's times are not measurements."""
    rows: Parts = {name: part["rows"] for name, part in parts.items()}
    reasons = {name: part["reason"] for name, part in parts.items() if part["status"] in ("skipped", "failed")}
    rows["paged"] = paged(rows.get("decode", []))
    rows["best_flashinfer"] = best_flashinfer(rows.get("peers", []))
    home = {"paged": "decode", "best_flashinfer": "peers"}
    judged = []
    for bar in bars(sizes):
        verdict = bar.judge(rows)
        part = home.get(bar.part, bar.part)
        if smoke:
            verdict = {name: verdict[name] for name in ("name", "says", "target", "at_most")}
            verdict |= {"state": "unmeasured", "why": "a smoke test measures nothing"}
        elif part not in parts:
            verdict["why"] = "this part was not asked for"
        elif part in reasons:
            verdict["why"] = reasons[part]
        judged.append(verdict)
    return judged


def paged(decodes: list[Row]) -> list[Row]:
    """Return, for each decode, the cost of scattered blocks relative to adjacent ones."""
    times: dict[tuple[str, str], dict[str, float]] = {}
    for row in decodes:
        times.setdefault((row["case"], row["shape"]), {})[row.get("layout", "")] = row.get("us")
    return [
        {"case": case, "shape": shape, "paged_over_contiguous": round(us["paged"] / us["contiguous"], 4)}
        for (case, shape), us in times.items()
        if us.get("paged") and us.get("contiguous")
    ]


def best_flashinfer(rows: list[Row]) -> list[Row]:
    """Return, for each decode, the faster of FlashInfer's two ways, or the reason why there is none."""
    best: dict[tuple[str, str], Row] = {}
    ways = [row for row in rows if row.get("peer", "").startswith("FlashInfer decode")]
    decodes = [row for row in ways if row.get("kind") == "decode"]
    if not decodes:
        return ways[:1]
    for row in decodes:
        place = (row["case"], row["shape"])
        if place not in best or row.get("ratio", 9e9) < best[place].get("ratio", 9e9):
            best[place] = row
    return list(best.values())
