"""Templates, and what they may use."""

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
from helexa.bench.pages import drawings, words
from helexa.core.version import __version__

Link = Callable[..., str | None]
"""Where a page is, by its name and what is asked of it; None where it is not to be had."""
Asset = Callable[[str], str]


def query_string(query: Mapping[str, Any]) -> str:
    """What is asked for, as the end of a URL; empty values are left out."""
    given = {name: value for name, value in query.items() if value not in (None, "", False)}
    return f"?{urlencode(given, quote_via=quote)}" if given else ""


def render(template: str, link: Link, asset: Asset, **context: Any) -> str:
    """A template's HTML."""
    return environment().get_template(template).render(link=link, asset=asset, version=__version__, **context)


@cache
def environment() -> Environment:
    """The templates' environment."""
    found = Environment(
        loader=PackageLoader("helexa.bench.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = ("number", "seconds", "measured", "share", "change", "moment", "day", "memory")
    found.filters |= {name: getattr(words, name) for name in names} | {"data": _data}
    found.globals |= {"METRICS": METRICS, "drawings": drawings}
    return found


@cache
def fingerprint(name: str) -> str:
    """A short hash of a static file, which makes its address change with it."""
    file = resources.files("helexa.bench.pages").joinpath("static").joinpath(name)
    return hashlib.sha256(file.read_bytes()).hexdigest()[:10]


def _data(value: object) -> Markup:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return Markup(text.replace("<", "\\u003c").replace("&", "\\u0026"))
