"""The files that the page is made of, as they lie in `static`, and the headers they are sent with.

Knows nothing of a server's state. Each file is read once and has a path of its own, so that no path
of a client ever names a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DIRECTORY = Path(__file__).parent / "static"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# By path: the page, and what it asks for.
FILES = {
    "/": "page.html",
    **{
        f"/static/{name}": name
        for name in (
            "page.css",
            "icon.svg",
            "main.js",
            "ask.js",
            "draw.js",
            "words.js",
            "peers.js",
            "pools.js",
            "requests.js",
            "prompt.js",
            "cached.js",
        )
    },
}
PAGE_PATHS = frozenset(FILES)
# Only our own files run, are loaded or requested, and no other page may frame this one: it may hold
# a key and show what a model says.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a server that was updated serves its own page
}


@dataclass(frozen=True, slots=True)
class PageFile:
    content: bytes
    content_type: str


def read_page_files() -> dict[str, PageFile]:
    """Every file by its path."""
    return {
        path: PageFile((DIRECTORY / name).read_bytes(), CONTENT_TYPES[Path(name).suffix])
        for path, name in FILES.items()
    }
