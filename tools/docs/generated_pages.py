"""Sphinx directives that generate the reference pages: keys of the configuration, public names.

``{configuration-keys}`` lists every key from the dataclasses of ``parallel2d/base/config``.
``{public-names}`` documents every name of ``import parallel2d``. The build of the site generates
both pages, so they are not committed.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import yaml
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import parallel2d
from parallel2d.base.config import help_page
from parallel2d.base.config.options import REQUIRED

# reStructuredText ends a code word only at a space or a punctuation mark.
_PLURAL = re.compile(r"(?<=\w`)(?=s\b)")


class ConfigurationKeys(SphinxDirective):
    """A section per dataclass with a definition per key."""

    def run(self) -> list[nodes.Node]:
        """Return the nodes of all sections."""
        text = "\n\n".join(_section(section) for section in help_page.sections())
        return self.parse_text_to_nodes(text, allow_section_headings=True)


class PublicNames(SphinxDirective):
    """The public functions and classes, documented by autodoc."""

    def run(self) -> list[nodes.Node]:
        """Return the nodes of all names."""
        parts = ["## Functions", *_documented("autofunction", inspect.isfunction)]
        # Without the members that exceptions inherit from Python.
        options = (":members:", ":inherited-members: ValueError, Exception, BaseException")
        parts += ["## Classes", *_documented("autoclass", inspect.isclass, *options)]
        return self.parse_text_to_nodes("\n\n".join(parts), allow_section_headings=True)


def public_names() -> list[str]:
    """Return every name of ``import parallel2d`` that the page documents."""
    return [name for name in parallel2d.__all__ if not name.startswith("__")]


def _documented(directive: str, is_kind: Any, *options: str) -> list[str]:
    names = [name for name in public_names() if is_kind(getattr(parallel2d, name))]
    block = "```{{eval-rst}}\n.. {}:: parallel2d.{}\n{}\n```"
    indented = "".join(f"   {option}\n" for option in options)
    return [block.format(directive, name, indented) for name in names]


def _section(section: help_page.Documented) -> str:
    title = f"`{section.key}`" if section.key else "Other keys"
    if section.family:
        title += f", models of family `{section.family}`"
    keys = [_key(key) for key in section.keys]
    return "\n\n".join([f"## {title}", section.text, *keys])


def _key(key: help_page.Documented) -> str:
    """Return the entry of a key: its name, then indented its allowed values, its default and its
    description."""
    facts = [key.allowed]
    if key.choices:
        facts = [", ".join(f"`{choice}`" for choice in key.choices)]
    facts.append(f"default `{_default(key.default)}`")
    if key.default == REQUIRED:
        facts[-1] = "required"
    return f"`{key.key}`\n: {'; '.join(facts)}\n\n  {key.text}"


def _default(value: Any) -> str:
    """Return a value in the form of the command line: ``null``, ``true``, ``[0.9, 0.95]``."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")


def _mark_plurals(*arguments: Any) -> None:
    """Separate the plural s from a code word, as in `DTensor`s. Without this, reStructuredText does
    not end the code word."""
    lines = arguments[-1]
    lines[:] = [_PLURAL.sub(r"\\ ", line) for line in lines]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives; Sphinx calls this."""
    app.add_directive("configuration-keys", ConfigurationKeys)
    app.add_directive("public-names", PublicNames)
    app.connect("autodoc-process-docstring", _mark_plurals)
    return {"parallel_read_safe": True}
