"""Sphinx builds the site from this folder; `make docs` runs it."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
BUILD = ROOT / "build" / "docs-sources"  # what the build makes for the pages

sys.path[:0] = [str(ROOT), str(DOCS)]

import diagrams  # noqa: E402
import plots  # noqa: E402

project = "torchkv"
author = "the torchkv developers"
release = version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "version"
]

extensions = [
    "breathe",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]

# Pages are Markdown that GitHub shows, too.
myst_heading_anchors = 3
myst_fence_as_directive = ["mermaid"]

html_theme = "furo"
html_title = f"torchkv {release}"
html_static_path = ["static"]
html_css_files = ["pages.css"]
html_copy_source = False
html_show_copyright = False
html_theme_options = {
    "source_edit_link": "",
    "source_view_link": "",
    "top_of_page_buttons": [],
}
pygments_style = "friendly"
pygments_dark_style = "monokai"
copybutton_exclude = ".linenos, .gp, .go"

autoclass_content = "both"  # the docstrings of class and constructor
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
# As the sources write them, not spelled out.
autodoc_type_aliases = {
    name: f"torchkv.kvstore.{name}"
    for name in ("Key", "Keys", "Optimizer", "Updater", "Values")
}
# Links of docstrings and signatures lead somewhere, except to what has no page here.
nitpicky = True
nitpick_ignore_regex = [
    (r"cpp:.*", r".*"),
    (r"py:.*", r"(collections\.abc|os|torch)\..*"),
    (r"py:class", r"torchkv\.(optim\.groups|optim\.torch_interface|registered)\..*"),
]
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

# The installed headers, described by the comments that they have.
HEADERS = ROOT / "torchkv" / "include" / "torchkv"
breathe_projects = {"torchkv": str(BUILD / "doxygen" / "xml")}
breathe_default_project = "torchkv"
breathe_domain_by_extension = {"h": "cpp"}
cpp_id_attributes = ["TORCHKV_API", "C10_NOINLINE"]


class Mermaid(SphinxDirective):
    """A fence ```` ```mermaid ````."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """The diagram as part of the page, so that it has the page's colors."""
        try:
            svg = diagrams.draw("\n".join(self.content))
        except diagrams.Unknown as error:
            raise self.error(f"mermaid: cannot draw {str(error)!r}") from error
        html = f'<div class="diagram">{svg}</div>'
        return [nodes.raw("", html, format="html")]


def unlink_builtins(app: Sphinx, doctree: nodes.document) -> None:
    """Python's `type` in a signature is not a property of that name."""
    for link in list(doctree.findall(addnodes.pending_xref)):
        if link["reftype"] == "class" and link["reftarget"] == "type":
            link.replace_self(nodes.Text("type"))


def write_aliases(*args: Any) -> tuple[str, str | None] | None:
    """Sphinx does not write an alias that is part of a union as its name."""
    signature, returned = args[-2:]
    if signature is None:
        return None
    return re.sub(r"TypeAliasForwardRef\('(.+?)'\)", r"\1", signature), returned


def make_sources(app: Sphinx) -> None:
    """Makes what pages include: the headers' descriptions, and plots."""
    BUILD.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["doxygen", str(DOCS / "Doxyfile")],
        cwd=HEADERS,
        env={**os.environ, "DOXYGEN_OUT": str(BUILD / "doxygen")},
        check=True,
    )
    plots.draw_all(DOCS / "drawn")


def setup(app: Sphinx) -> dict[str, Any]:
    """Adds the directive and the steps above."""
    app.add_directive("mermaid", Mermaid)
    app.connect("builder-inited", make_sources)
    app.connect("autodoc-process-signature", write_aliases)
    app.connect("doctree-read", unlink_builtins)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
