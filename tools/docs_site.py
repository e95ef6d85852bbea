"""Gathers the pages of the documentation site; a hook of mkdocs, which mkdocs.yml names.

The site has the paths of the repository, so a relative link means the same on GitHub and here: README.md is the home
page, docs/ stays docs/. Three things are made:

- quickstart.md and benchmarks.md hold sections of README.md, which the home page then leaves out, and all its figures
  but the first;
- docs/api/MODULE.md, where the navigation lists it, documents a module from its docstrings;
- what a page links to or shows outside docs/ (figures, sources) is put where the link expects it.

A page that the navigation lists and that does not exist is dropped; mkdocs warns of one that exists and is not listed.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
API = "docs/api/"

# Sections of the README that are pages of their own: page, title, headings.
SECTIONS = (
    ("quickstart.md", "Quick start", ("Two commands", "Install", "Use")),
    ("benchmarks.md", "Benchmarks", ("Measured",)),
)

_FIGURES = re.compile(r"(?<=<!-- bench:figures -->\n).*?(?=<!-- /bench:figures -->)", re.DOTALL)
_LINK = re.compile(r"\]\(([^)#?\s]+)")
_ITEM = re.compile(r"([-*]|\d+\.) ")
_FENCE = re.compile(r"```|~~~")


def split_sections(page: str) -> dict[str, str]:
    """The parts of a Markdown page by their `## ` heading, which stays in them; "" is what comes before the first.

    Raises:
        ValueError: two sections have one heading, so that one would be lost.
    """
    sections = {"": ""}
    heading, fenced = "", False
    for line in page.splitlines(keepends=True):
        fenced ^= _FENCE.match(line) is not None
        if line.startswith("## ") and not fenced:
            heading = line[3:].strip()
            if heading in sections:
                raise ValueError(f"docs_site: two sections are called {heading!r}")
            sections[heading] = ""
        sections[heading] += line
    return sections


def readme_pages(readme: str) -> dict[str, str]:
    """README.md without the sections that are pages of their own, and those pages.

    Raises:
        ValueError: a heading of SECTIONS, or the figures, are not in the README.
    """
    figures = _FIGURES.search(readme)
    if figures is None:
        raise ValueError("docs_site: README.md has no figures between <!-- bench:figures --> and its end")
    first = figures.group().split("\n\n")[0] + "\n"
    sections = split_sections(readme[: figures.start()] + first + readme[figures.end() :])
    pages = {}
    for page, title, headings in SECTIONS:
        if lost := [heading for heading in headings if heading not in sections]:
            raise ValueError(f"docs_site: README.md has no section {lost[0]!r}; tools/docs_site.py names its sections")
        pages[page] = f"# {title}\n\n" + "".join(sections.pop(heading) for heading in headings)
    pages["benchmarks.md"] = pages["benchmarks.md"].replace("## Measured\n\n", figures.group() + "\n")
    return {"README.md": "".join(sections.values()), **pages}


def separate_lists(page: str) -> str:
    """The page with an empty line between a paragraph and its list, which Python-Markdown needs and GitHub does not."""
    lines: list[str] = []
    fenced = False
    for line in page.splitlines(keepends=True):
        fenced ^= _FENCE.match(line) is not None
        before = lines[-1] if lines else "\n"
        if not fenced and _ITEM.match(line) and before[0] not in " #|<>\n" and not _ITEM.match(before):
            lines.append("\n")
        lines.append(line)
    return "".join(lines)


def module_of(page: str) -> str:
    """docs/api/syncfree_ext.reference.md documents syncfree_ext.reference."""
    return page.removeprefix(API).removesuffix(".md")


def exists(page: str) -> bool:
    """Whether a page of the navigation can be made: from a module, from the README or from its own file."""
    if page.startswith(API):
        path = ROOT / module_of(page).replace(".", "/")
        return path.with_name(path.name + ".py").exists() or (path / "__init__.py").exists()
    return (ROOT / page).exists() or page in {name for name, _, _ in SECTIONS}


def prune(nav: list[Any]) -> list[Any]:
    """The navigation without the pages that are not there and the groups that are left empty."""
    kept: list[Any] = []
    for entry in nav:
        ((title, target),) = entry.items()
        if isinstance(target, str):
            if exists(target):
                kept.append(entry)
        elif inside := prune(target):
            kept.append({title: inside})
    return kept


def listed(nav: list[Any]) -> Iterator[str]:
    """The pages of a navigation, in order."""
    for entry in nav:
        for target in entry.values():
            if isinstance(target, str):
                yield target
            else:
                yield from listed(target)


def api_page(module: str) -> str:
    """What has mkdocstrings document a module."""
    return f"# {module}\n\n::: {module}\n"


def linked_files(page: str, text: str) -> Iterator[str]:
    """The files of the repository, other than pages, that the relative links of a page lead to."""
    for target in _LINK.findall(text):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
        if not path.startswith("..") and not path.endswith(".md") and (ROOT / path).is_file():
            yield path


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Takes pages that are not there out of the navigation."""
    config.nav = prune(config.nav or [])
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Gives docs/ its place below the root and adds what is gathered from elsewhere."""
    texts = readme_pages((ROOT / "README.md").read_text(encoding="utf-8"))
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
            path = f"docs/{file.src_uri}"
            if path.endswith(".md"):
                texts[path] = file.content_string
            else:
                files.append(_copied(path, config))
    for page in listed(config.nav or []):
        if page not in texts:
            made = api_page(module_of(page)) if page.startswith(API) else (ROOT / page).read_text(encoding="utf-8")
            texts[page] = made
    for page, text in texts.items():
        files.append(File.generated(config, page, content=separate_lists(text)))
    for page, text in texts.items():
        for path in linked_files(page, text):
            if files.get_file_from_path(path) is None:
                files.append(_copied(path, config))
    return files


def _copied(path: str, config: MkDocsConfig) -> File:
    return File(path, str(ROOT), config.site_dir, config.use_directory_urls)
