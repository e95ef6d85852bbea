"""The names in docs/migration.md and docs/trainers.md exist: ours always, those of others where they are installed."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

import syncfree_ext
from syncfree_ext.integrations import liger

DOCS = Path(__file__).parent.parent.parent / "docs"
if not DOCS.exists():
    pytest.skip("the documents are part of the checkout, not of the wheel", allow_module_level=True)

ARGUMENTS = set(inspect.signature(syncfree_ext.linear_cross_entropy).parameters)
OURS = ARGUMENTS | set(syncfree_ext.__all__)
LIGER = set(inspect.signature(liger.liger_fused_linear_cross_entropy).parameters) | set(vars(liger))


def section(title: str) -> str:
    text = (DOCS / "migration.md").read_text(encoding="utf-8")
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


def table(title: str) -> list[list[str]]:
    """The cells below the head of a section's table, without backquotes."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")][2:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split(" | ")] for line in lines]


def test_liger() -> None:
    rows = table("From Liger-Kernel")
    assert len(rows) == 20
    for theirs, same, ours in rows:
        assert theirs == same
        assert same in LIGER, same
        assert ours in OURS, ours
    named = {row[0] for row in rows}
    # No argument is left out of the table.
    assert set(inspect.signature(liger.liger_fused_linear_cross_entropy).parameters) <= named


@pytest.mark.parametrize("title", ["From `F.linear` and `F.cross_entropy`", "From Cut Cross-Entropy"])
def test_names_of_ours(title: str) -> None:
    rows = table(title)
    assert len(rows) > 5
    found = set()
    for _, ours in rows:
        found |= {match for match in re.findall(r"\b([A-Za-z_]+)(?==|\(|`|$)", ours) if match in OURS}
        words = re.findall(r"^([A-Za-z_]+)", ours)
        assert ours.startswith("any ") or all(word in OURS for word in words), ours
    assert found


def test_names_of_torch() -> None:
    function = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if function is None:
        pytest.skip("this torch has no linear_cross_entropy")
    named = set(re.findall(r"`(\w+)`", section("From `torch.nn.functional.linear_cross_entropy`")))
    named -= {"chunk_rows", "workspace_bytes"}
    assert named <= ARGUMENTS
    assert named <= set(inspect.signature(function).parameters), set(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", ["trainers.md", "migration.md"])
def test_imports_in_the_guides(name: str) -> None:
    """What the guides import from here is there; modules that need another library are looked at as text."""
    package = Path(syncfree_ext.__file__).parent
    text = (DOCS / name).read_text(encoding="utf-8")
    imports = re.findall(r"from syncfree_ext\.integrations\.(\w+) import (\w+)", text)
    assert imports or name == "migration.md"
    for module, imported in imports:
        source = (package / "integrations" / f"{module}.py").read_text(encoding="utf-8")
        assert re.search(rf"^(def|class) {imported}\b", source, re.MULTILINE), (module, imported)
