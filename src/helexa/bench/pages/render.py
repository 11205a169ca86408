"""Renders the HTML templates (Jinja)."""

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from helexa.bench.measurement.metrics import METRICS
from helexa.bench.pages import drawings, formatting
from helexa.core.version import __version__

Link = Callable[..., str | None]
"""Function that returns the URL of a page from its name and query parameters, or None if the page is unavailable."""
Asset = Callable[[str], str]


def query_string(query: Mapping[str, Any]) -> str:
    """Return `query` as the query part of a URL, starting with `?`. Empty values are omitted."""
    arguments = {name: value for name, value in query.items() if value not in (None, "", False)}
    return f"?{urlencode(arguments, quote_via=quote)}" if arguments else ""


def render(template: str, link: Link, asset: Asset, **context: Any) -> str:
    """Return the HTML of a template.

    Args:
        template: file name of the template.
        link: returns the URL of a page.
        asset: returns the URL of a static file.
        context: further variables of the template.
    """
    return environment().get_template(template).render(link=link, asset=asset, version=__version__, **context)


@cache
def environment() -> Environment:
    """Return the Jinja environment with all filters and globals of the templates."""
    jinja = Environment(
        loader=PackageLoader("helexa.bench.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = ("number", "seconds", "measured", "share", "change", "moment", "day", "memory")
    jinja.filters |= {name: getattr(formatting, name) for name in names} | {"data": _data}
    jinja.globals |= {"METRICS": METRICS, "drawings": drawings}
    return jinja


@cache
def fingerprint(name: str) -> str:
    """Return a short hash of a static file's content.

    The hash is a part of the file's URL. When the file changes, its URL changes, and browsers do not use a cached old
    version.
    """
    file = resources.files("helexa.bench.pages").joinpath("static").joinpath(name)
    return hashlib.sha256(file.read_bytes()).hexdigest()[:10]


def _data(value: object) -> Markup:
    """Return `value` as JSON that is safe to embed in an HTML element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return Markup(text.replace("<", "\\u003c").replace("&", "\\u0026"))
