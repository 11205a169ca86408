"""Add a label to every row of a CSV file. The model answers one prompt per row, many prompts at a time.

    python examples/classify_csv.py examples/reviews.csv text > labelled.csv

A JSON Schema limits each answer to one of the labels. The script therefore needs no code that parses free text.
"""

import argparse
import csv
import sys

import helexa

LABELS = ["positive", "negative"]
SCHEMA = {"enum": LABELS}


def main() -> None:
    """Read the CSV file, ask the model for the label of each row, and write the rows with their labels to stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("column")
    parser.add_argument("--model")
    asked = parser.parse_args()
    with open(asked.file, newline="", encoding="utf-8") as file:  # noqa: PTH123
        rows = list(csv.DictReader(file))
    prompts = [f"Is this review {' or '.join(LABELS)}?\n\n{row[asked.column]}" for row in rows]
    results = helexa.batch(prompts, model=asked.model, schema=SCHEMA, temperature=0, max_tokens=20, on_error="return")
    writer = csv.DictWriter(sys.stdout, [*rows[0], "label", "error"])
    writer.writeheader()
    for row, result in zip(rows, results, strict=True):
        if isinstance(result, helexa.Completion):
            writer.writerow({**row, "label": result.parsed})
        else:
            writer.writerow({**row, "error": str(result)})


if __name__ == "__main__":
    main()
