"""What is made of results of the benchmark: merged files, comparisons, tables, the README's figures; the commands."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("bench", reason="the benchmark is part of the checkout, not of the wheel")

from bench import compare, fetch_peers, figures, heads, plots, results, table


def record(head: str, status: str = "ok", **fields: Any) -> results.Record:
    size = {"BT": 8192, "H": 4096, "V": 128256}
    identity = {
        "routine": "flce",
        "shape": "llama8b",
        "dtype": "bfloat16",
        "data": "unit",
        "ignored": 0.0,
        "variant": "",
    }
    return {"status": status, "head": head, **identity, **size, "date": "2026-01-02T00:00:00Z", **fields}


def ms(median: float, spread: float = 0.01) -> dict[str, float]:
    return {"median": median, "lo": median * (1 - spread), "hi": median * (1 + spread), "n": 10}


def result(*records: results.Record, name: str = "Test GPU", kind: str = "cuda") -> dict[str, Any]:
    environment = {"device": name, "kind": kind, "driver": "1", "torch": "2", "packages": {"liger-kernel": "0.8.5"}}
    return {"format": results.FORMAT, "environments": {name: environment}, "records": list(records)}


def test_merge_keeps_the_later_record_unless_it_is_a_skip() -> None:
    old = result(record("torch", peak_mib=1.0), record("liger", peak_mib=2.0))
    new = result(record("torch", peak_mib=3.0), record("liger", "skipped"), record("cce", "skipped"))
    merged = {r["head"]: r for r in results.merge([old, new])["records"]}
    assert merged["torch"]["peak_mib"] == 3.0
    assert merged["liger"]["peak_mib"] == 2.0
    assert merged["cce"]["status"] == "skipped"
    with pytest.raises(ValueError, match="Other GPU"):
        results.merge([old, result(record("torch"), name="Other GPU")])


def test_merge_drops_environments_that_no_record_was_measured_in() -> None:
    old = result(record("torch", environment="Test GPU"), record("liger", environment="Test GPU"))
    new = result(record("torch", environment="newer"))
    new["environments"] = {"newer": new["environments"]["Test GPU"]}
    assert set(results.merge([old, new])["environments"]) == {"Test GPU", "newer"}
    old["records"] = old["records"][:1]
    assert set(results.merge([old, new])["environments"]) == {"newer"}


def test_result_files_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "a" / "r.json"
    results.write(path, result(record("torch", train_ms=ms(1.23456789))))
    assert results.read(path)["records"][0]["train_ms"]["median"] == 1.2346
    (tmp_path / "bad.json").write_text(json.dumps({"format": 0}))
    with pytest.raises(ValueError, match="format"):
        results.read(tmp_path / "bad.json")


# -------------------------------------------------------------------------------------------------------------- compare

GOOD = record(
    "syncfree", train_ms=ms(40.0), x_limit=1.05, peak_mib=2600.0, error={"loss": 1e-7, "dx": 1.7e-3, "dw": 1.7e-3}
)


@pytest.mark.parametrize(
    ("change", "worse"),
    [
        ({}, []),
        ({"train_ms": ms(50.0), "x_limit": 1.05}, []),  # a slower day: the limit was slower too
        ({"train_ms": ms(42.0), "x_limit": 1.10}, ["x_limit"]),
        ({"train_ms": ms(42.0, 0.2), "x_limit": 1.10}, []),  # within the spread
        ({"peak_mib": 2700.0}, ["peak_mib"]),
        ({"error": {"loss": 1e-7, "dx": 2.5e-3, "dw": 1.7e-3}}, ["error of dx"]),
        ({"error": {"loss": 1e-7, "dx": math.nan, "dw": 1.7e-3}}, ["error of dx"]),
        ({"status": "wrong", "reason": "dx"}, ["was ok, is wrong"]),
    ],
)
def test_compare_finds_what_got_worse(change: dict[str, Any], worse: list[str]) -> None:
    found = compare.compare(result(GOOD), result({**GOOD, **change}), heads.parse("ours"))
    assert len(found.worse) == len(worse)
    assert all(word in line for word, line in zip(worse, found.worse, strict=True))


def test_compare_leaves_peers_alone_and_names_what_is_missing() -> None:
    slow = {**GOOD, "head": "liger", "x_limit": 9.0, "train_ms": ms(400.0)}
    found = compare.compare(result(GOOD, {**GOOD, "head": "liger"}), result(slow), heads.parse("ours"))
    assert (found.worse, len(found.missing)) == ([], 1)


# ------------------------------------------------------------------------------------------------- tables and figures


def test_pareto_front() -> None:
    assert plots.pareto([(1, 5), (2, 5), (2, 3), (3, 4), (4, 1), (4, 1)]) == [(1, 5), (2, 3), (4, 1)]


def full_result() -> dict[str, Any]:
    error = {"loss": 1e-7, "dx": 1.7e-3, "dw": 1.7e-3}
    timed = {"error": error, "rounding": error, "infer_ms": ms(13.0), "tflops": 600.0}
    records = [record("limit", train_ms=ms(37.0), tflops=690.0)]
    for i, head in enumerate(("syncfree", "syncfree-lean@1024", "torch", "liger-c8", "cce")):
        records.append(record(head, train_ms=ms(40.0 + 9 * i), x_limit=1.1 + i / 4, peak_mib=3000.0 + 5 * i, **timed))
    records.append(record("quack", "wrong", reason="relative error of dx is 0.5, more than 0.1"))
    records.append(record("fla", "skipped", reason="fla-core cannot be imported here"))
    for ignored in (0.0, 0.5):
        r = record("syncfree", train_ms=ms(40.0), x_limit=1.0 - ignored)
        records.append({**r, "routine": "ragged", "ignored": ignored})
    for BT in (1024, 2048):
        r = record("syncfree", train_ms=ms(40.0), x_limit=1.0, tflops=600.0)
        records.append({**r, "routine": "scale", "variant": "BT", "axis": "BT", "base": "llama8b", "BT": BT})
    times = {f"{on}_{part}_ms": ms(1.0) for on in ("host", "gpu") for part in ("forward", "backward")}
    r = record("syncfree", **times, syncs_forward=0, syncs_backward=0, copy_ms=38.0)
    records.append({**r, "routine": "backlog", "variant": "upstream 1"})
    return result(*records)


def test_tables_leave_out_empty_columns_and_say_why() -> None:
    times, exactness = table.tables(full_result())[:2]
    assert "× limit" in times.header
    assert "× real" not in times.header
    assert exactness.rows[-1][0] == "exact, rounded"
    text = times.markdown()
    assert "wrong: relative error of dx is 0.5" in text
    assert text.count("\n") == len(times.rows) + 1


def test_a_row_of_another_run_says_so() -> None:
    """Its products took another time than those in the title."""
    data = full_result()
    data["environments"]["again"] = data["environments"]["Test GPU"]
    for r in data["records"]:
        r["environment"] = "again" if r["head"] == "torch" else "Test GPU"
    (part,) = figures.summary_tables(data)
    names = [row[0] for row in part.rows]
    assert "`torch`, in another run" in names
    assert sum("another run" in name for name in names) == 1


def test_figures_fill_the_readme(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    readme = tmp_path / "README.md"
    empty = "".join(f"<!-- bench:{name} -->\nold\n<!-- /bench:{name} -->\n" for name in ("figures", "table"))
    body = f"before\n{empty}after\n"
    readme.write_text(body)
    folder = tmp_path / "bench" / "results"
    with pytest.raises(ValueError, match="no result files"):
        figures.update(readme, folder)
    results.write(folder / "2026-01-01-gpu.json", result(record("torch", "failed", reason="an old result")))
    gpu = full_result()
    gpu["records"] += [{**r, "shape": "gemma2b"} for r in gpu["records"] if r["routine"] == "flce"]
    # A part of it was run where one package more was installed.
    gpu["environments"]["again"] = {**gpu["environments"]["Test GPU"], "packages": {"fla-core": "0.6.0"}}
    results.write(folder / "2026-01-02-gpu.json", gpu)
    cpu = {**GOOD, "routine": "cpu", "shape": "cpu"}
    results.write(folder / "2026-01-02-cpu.json", result(cpu, name="Test CPU", kind="cpu"))

    assert figures.update(readme, folder, check=True)
    assert readme.read_text() == body
    assert figures.update(readme, folder)
    page = readme.read_text()
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old" not in page.split()
    for name in ("pareto", "ragged", "scale", "backlog", "cpu"):
        assert f"(bench/figures/{name}.svg)" in page
        assert (tmp_path / "bench" / "figures" / f"{name}.png").stat().st_size > 1000
    assert "**`syncfree`**" in page
    assert "three matrix products take 37.00 ms" in page
    assert page.index("Test GPU") < page.index("Test CPU")
    assert page.count("Test GPU, driver 1, torch 2, liger-kernel 0.8.5, fla-core 0.6.0; 2026-01-02.") == 1
    folded = re.findall(r'<details markdown="1"><summary>(.+?)</summary>\n\n\|.+?\|\n\n</details>', page, re.DOTALL)
    titles = [part.title for part in figures.summary_tables(gpu)]
    assert folded == titles[1:]
    assert len(folded) == page.count("<details") == page.count("</details>") > 0
    assert f"{titles[0]}:\n\n|" in page
    assert not figures.update(readme, folder, check=True)

    readme.write_text("no markers")
    with pytest.raises(ValueError, match="must hold"):
        figures.update(readme, folder)


# --------------------------------------------------------------------------------------------------------- command line


def run_command(*arguments: str) -> Any:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from bench.__main__ import app

    return CliRunner().invoke(app, list(arguments))


def test_command_runs_a_routine_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    options = ["--device", "cpu", "--shapes", "48x16x97", "--peers", "torch", "--rounds", "1", "--block-ms", "0"]
    done = run_command("flce", *options, "--json", str(path))
    assert done.exit_code == 0, done.output
    assert "torch" in done.output
    data_read = results.read(path)
    assert {r["head"] for r in data_read["records"]} == {"torch", "limit", "limit-real"}
    assert next(iter(data_read["environments"].values()))["torch"] == torch.__version__


def test_command_refuses_what_it_does_not_know() -> None:
    for wrong in (("--shapes", "huge"), ("--peers", "nobody"), ("--dtype", "int4"), ("--data", "zeros")):
        done = run_command("flce", "--device", "cpu", *wrong)
        assert done.exit_code == 2
        assert wrong[1] in done.output


def test_command_compare_exits_by_what_it_finds(tmp_path: Path) -> None:
    for name, data_written in (("a", GOOD), ("b", {**GOOD, "peak_mib": 9999.0})):
        results.write(tmp_path / f"{name}.json", result(data_written))
    a, b = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    assert run_command("compare", a, a).exit_code == 0
    assert run_command("compare", b, a).exit_code == 0
    done = run_command("compare", a, b)
    assert done.exit_code == 1
    assert "peak_mib 2600 -> 9999" in done.output
    assert run_command("compare", a, str(tmp_path / "none.json")).exit_code == 2


def test_command_merges_parts(tmp_path: Path) -> None:
    for name in ("torch", "liger"):
        results.write(tmp_path / "parts" / f"{name}.json", result(record(name, peak_mib=1.0)))
    out = tmp_path / "all.json"
    assert run_command("merge", str(tmp_path / "parts"), "--json", str(out)).exit_code == 0
    assert {r["head"] for r in results.read(out)["records"]} == {"torch", "liger"}


# ----------------------------------------------------------------------------------------------------------- fetching


def test_wheels_are_cut_and_put_together_again(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    contents = {"big-1.whl": bytes(range(256)) * 10_000, "small-1.whl": b"abc"}
    for name, content in contents.items():
        (wheels / name).write_bytes(content)
    parts = fetch_peers.split(wheels, 1)
    assert len(parts) == 3
    assert all(sum(p.stat().st_size for p in part.iterdir()) <= 10**6 for part in parts)
    with pytest.raises(ValueError, match="pieces of big-1"):
        fetch_peers.collect(parts[1:], tmp_path / "broken")
    joined = fetch_peers.collect(parts, tmp_path / "joined")
    assert {p.name: p.read_bytes() for p in joined} == contents


def test_peers_are_pinned(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(name.count("==") == 1 for name in fetch_peers.requirements())
    assert fetch_peers.main(["list"]) == 0
    assert "liger-kernel==" in capsys.readouterr().out
