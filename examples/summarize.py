"""Summarize a text that is longer than the model's context: first its parts (map), then their summaries (reduce).

    python examples/summarize.py book.txt

The model summarizes many parts at a time. If the summaries of all parts together are still too long, they are divided
into parts and summarized again.
"""

import argparse
from pathlib import Path

import helexa


def parts(text: str, size: int) -> list[str]:
    """Divide a text into parts of about `size` characters, between paragraphs if possible, and return the parts."""
    found = [""]
    for paragraph in text.split("\n\n"):
        for start in range(0, len(paragraph), size):
            piece = paragraph[start : start + size]
            if len(found[-1]) + len(piece) > size:
                found.append("")
            found[-1] += piece + "\n\n"
    return [part for part in found if part.strip()]


def summary(text: str, model: helexa.Model, size: int) -> str:
    """Return a summary of `text` in a few sentences. The model reads about `size` characters at a time."""
    while len(pieces := parts(text, size)) > 1:
        prompts = [f"Summarise in two sentences:\n\n{piece}" for piece in pieces]
        shorter = "\n\n".join(str(answer) for answer in model.batch(prompts, temperature=0, max_tokens=size // 16))
        if len(shorter) >= len(text):
            break  # another round would not make the text shorter
        text = shorter
    return str(model.generate(f"Summarise in three sentences:\n\n{text[:size]}", temperature=0, max_tokens=200))


def main() -> None:
    """Read a text file and print its summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--size", type=int, default=4000, help="characters that are read at once")
    asked = parser.parse_args()
    print(summary(asked.file.read_text(encoding="utf-8"), helexa.load(asked.model), asked.size))


if __name__ == "__main__":
    main()
