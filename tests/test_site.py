"""How the pages of the documentation site are gathered from the repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="mkdocs is not installed: the site is not tested (make docs installs it)")

from tools import docs_site

ROOT = Path(__file__).parent.parent

README = """# Name

Intro.

<!-- bench:figures -->
![First.](bench/figures/first.svg)

![Second.](bench/figures/second.svg)
<!-- /bench:figures -->

## Two commands

```python
## no heading
```

## Measured

Numbers.

## Install

## Use

### Options

## Limits
"""


def test_readme_is_split_without_loss() -> None:
    pages = docs_site.readme_pages(README)
    assert list(pages) == ["README.md", "quickstart.md", "benchmarks.md"]
    assert "Intro." in pages["README.md"]
    assert "first.svg" in pages["README.md"]
    assert "second.svg" not in pages["README.md"]
    assert "## Limits" in pages["README.md"]
    for heading in ("## Two commands", "## no heading", "## Install", "## Use", "### Options"):
        assert heading in pages["quickstart.md"]
        assert heading not in pages["README.md"]
    assert pages["benchmarks.md"].startswith("# Benchmarks\n\n![First.]")
    assert "second.svg" in pages["benchmarks.md"]
    assert "Numbers." in pages["benchmarks.md"]


@pytest.mark.parametrize("lost", ["## Use\n", "## Measured\n", "<!-- bench:figures -->"])
def test_readme_without_a_part_is_an_error(lost: str) -> None:
    with pytest.raises(ValueError, match="docs_site"):
        docs_site.readme_pages(README.replace(lost, ""))


def test_two_sections_of_one_name_are_an_error() -> None:
    with pytest.raises(ValueError, match="Limits"):
        docs_site.split_sections(README + "\n## Limits\n")


def test_lists_are_separated() -> None:
    page = "# Title\nText\n- one\n  more\n- two\n\n`code`\n1. first\n\n```\ntext\n- code\n```\n| a |\n"
    apart = "# Title\nText\n\n- one\n  more\n- two\n\n`code`\n\n1. first\n\n```\ntext\n- code\n```\n| a |\n"
    assert docs_site.separate_lists(page) == apart
    assert docs_site.separate_lists(apart) == apart


def test_navigation_keeps_what_is_there() -> None:
    nav = [
        {"Home": "README.md"},
        {"Later": [{"No page": "docs/no_page.md"}, {"No module": "docs/api/syncfree_ext.no_module.md"}]},
        {"Reference": [{"API": "docs/api/syncfree_ext.md"}, {"No": "docs/no.md"}, {"Loss": "docs/semantics.md"}]},
        {"Start": "quickstart.md"},
    ]
    kept = docs_site.prune(nav)
    assert list(docs_site.listed(kept)) == [
        "README.md",
        "docs/api/syncfree_ext.md",
        "docs/semantics.md",
        "quickstart.md",
    ]
    assert [next(iter(entry)) for entry in kept] == ["Home", "Reference", "Start"]


def test_linked_files_are_found_beside_their_page() -> None:
    text = (
        "[a](build.md) ![b](../bench/figures/pareto.svg) [c](../LICENSE#x) [d](https://a.b/c.svg) [e](../../f) [g](no)"
    )
    assert list(docs_site.linked_files("docs/x.md", text)) == ["bench/figures/pareto.svg", "LICENSE"]


@pytest.mark.slow
@pytest.mark.parametrize(("link", "fails"), [("docs/build.md", False), ("docs/no_such_page.md", True)])
def test_a_broken_link_stops_the_build(tmp_path: Path, link: str, fails: bool) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    (tmp_path / "tools").mkdir()
    for name in ("mkdocs.yml", "tools/docs_site.py"):  # the hook takes the pages beside it
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("docs", "syncfree_ext", "bench", "LICENSE", "CITATION.cff", "CONTRIBUTING.md", "CHANGELOG.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (tmp_path / "README.md").write_text(f"{readme}\n[link]({link})\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stderr
    assert (link in done.stderr) == fails
