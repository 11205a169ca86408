"""Writes the table in docs/clients.md from result.json. `make outside` runs this script after each run."""

import programs
import results

PAGE = programs.FOLDER.parent / "docs" / "clients.md"
RESULT = programs.FOLDER / "result.json"
BEGIN, END = "<!-- table of outside/result.json: make outside -->\n", "<!-- end of the table -->\n"


def with_table(page: str, result: str) -> str:
    """Return the text `page` of docs/clients.md with a new table between the two markers.

    Args:
        page: current text of docs/clients.md.
        result: results of a run as JSON text.

    Raises:
        ValueError: a marker is missing in `page`.
    """
    head, begin_marker, remainder = page.partition(BEGIN)
    _, ended, tail = remainder.partition(END)
    if not (begin_marker and ended):
        raise ValueError(f"{PAGE} lacks the marks {BEGIN.strip()} and {END.strip()}")
    return head + BEGIN + results.client_table(result, programs.load().known_failures) + END + tail


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), RESULT.read_text()))
