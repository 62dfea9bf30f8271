"""What the site has beyond docs/: the files of the repository that its pages link to, and all measurements.

Pages are written for readers of the repository, with links relative to the file they stand in. Here every link is looked
up in the repository: one to a page becomes one inside the site, one to source text becomes one to a page that shows it,
and one to nothing is a warning, which `mkdocs build --strict` turns into an error.
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
            if path.suffix == ".md" or path.suffix == ".png":
                files.append(File.generated(config, uri, abs_src_path=str(path)))
            else:
                files.append(File.generated(config, uri, content=_listing(path)))
        if path.suffix == ".md":
            for link, _ in LINK.findall(path.read_text()):
                target = (path.parent / link).resolve()
                if target.is_file() and target.is_relative_to(ROOT) and target not in seen:
                    seen.add(target)
                    todo.append(target)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links between files of the repository into links between pages of the site."""
    source = page.file.src_uri
    here = ROOT / ("docs" / Path(source) if (ROOT / "docs" / source).exists() else source)

    def replace(match: re.Match[str]) -> str:
        target = (here.parent / match[1]).resolve()
        if not target.is_file():
            log.warning(f"{here.relative_to(ROOT)} links to {match[1]}, which is no file of the repository")
            return match[0]
        return os.path.relpath(_uri(target), PurePosixPath(source).parent) + (match[2] or "")

    return LINK.sub(replace, markdown)


def _results() -> list[Path]:
    return sorted((ROOT / RESULTS).glob("*.md"))


def _uri(path: Path) -> str:
    """Where the site has a file of the repository."""
    inside = path.relative_to(ROOT).as_posix().removeprefix("docs/")
    return inside if path.suffix in (".md", ".png", ".svg") else f"{inside}.md"


def _listing(path: Path) -> str:
    return f"# {path.relative_to(ROOT).as_posix()}\n\n````{path.suffix[1:]}\n{path.read_text()}````\n"
