"""Writes the table of docs/clients.md from result.json; `make outside` runs this module after each run."""

import programs
import results

PAGE = programs.FOLDER.parent / "docs" / "clients.md"
RESULT = programs.FOLDER / "result.json"
BEGIN, END = "<!-- table of outside/result.json: make outside -->\n", "<!-- end of the table -->\n"


def with_table(page: str, result: str) -> str:
    """Return the text of docs/clients.md with the table of the JSON result between its two marks.

    Raises:
        ValueError: a mark is missing.
    """
    before, found, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise ValueError(f"{PAGE} lacks the marks {BEGIN.strip()} and {END.strip()}")
    return before + BEGIN + results.client_table(result, programs.load().known_failures) + END + after


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), RESULT.read_text()))
