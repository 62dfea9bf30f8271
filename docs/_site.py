"""What the site has beyond docs/: the files of the repository that its pages link to, and all measurements.

Pages are written for readers of the repository, with links relative to the file they stand in. Here every link is looked
up in the repository: one to a page becomes one inside the site, one to source text or to a folder becomes one to a page
that shows it, and one to nothing is a warning, which `mkdocs build --strict` turns into an error.
"""

import logging
import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results"
AS_IT_IS = (".md", ".png", ".svg")
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")

log = logging.getLogger("mkdocs.hooks.site")


def on_config(config: MkDocsConfig) -> None:
    """Adds the measurements to the navigation."""
    assert config.nav is not None
    config.nav.append({"Measurements": [path.relative_to(ROOT).as_posix() for path in _results()]})


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the pages outside of docs/ and, for as long as that finds more, what they and the others link to."""
    todo = [ROOT / "README.md", ROOT / "checkpoints/README.md", *_results()]
    todo += [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    seen = set(todo)
    while todo:
        path = todo.pop()
        uri = _uri(path)
        if files.get_file_from_path(uri) is None:
            if path.suffix in AS_IT_IS:
                files.append(File.generated(config, uri, abs_src_path=str(path)))
            else:
                files.append(File.generated(config, uri, content=_listing(path)))
        targets = [target for link, _ in LINK.findall(_text(path)) if (target := _target(path, link))]
        todo += [target for target in dict.fromkeys(targets) if target not in seen]
        seen.update(targets)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links between files of the repository into links between pages of the site."""
    source = page.file.src_uri
    here = ROOT / ("docs" / Path(source) if (ROOT / "docs" / source).exists() else source)

    def replace(match: re.Match[str]) -> str:
        target = _target(here, match[1])
        if target is None:
            log.warning(f"{here.relative_to(ROOT)} links to {match[1]}, which is not in the repository")
            return match[0]
        return os.path.relpath(_uri(target), PurePosixPath(source).parent) + (match[2] or "")

    return LINK.sub(replace, markdown)


def _results() -> list[Path]:
    return sorted((ROOT / RESULTS).glob("*.md"))


def _target(page: Path, link: str) -> Path | None:
    """What a page's link points to, if it is a file or folder of the repository."""
    target = (page.parent / link).resolve()
    return target if target.exists() and target.is_relative_to(ROOT) else None


def _uri(path: Path) -> str:
    """Where the site has a file or folder of the repository."""
    inside = path.relative_to(ROOT).as_posix().removeprefix("docs/")
    if path.is_dir():
        return f"{inside}/index.md"
    return inside if path.suffix in AS_IT_IS else f"{inside}.md"


def _text(path: Path) -> str:
    """The text whose links count: none of source text."""
    if path.is_dir():
        return _listing(path)
    return path.read_text() if path.suffix == ".md" else ""


def _listing(path: Path) -> str:
    title = f"# {path.relative_to(ROOT).as_posix()}\n\n"
    if path.is_dir():
        names = sorted(child.name for child in path.iterdir() if child.suffix in (".md", ".py"))
        return title + "".join(f"- [{name}]({name})\n" for name in names)
    return f"{title}````{path.suffix[1:]}\n{path.read_text()}````\n"
