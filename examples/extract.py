"""Take facts out of texts: each answer is an instance of a pydantic model.

echo "Ann Miller, 31, is a baker in York." | python examples/extract.py
"""

import argparse
import sys

from pydantic import BaseModel, Field

import helexa


class Person(BaseModel):
    """What is wanted of each line. Bounds keep a small model from going on for ever."""

    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=150)
    job: str = Field(max_length=40)


def main() -> None:
    """Read lines, print a JSON object for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    asked = parser.parse_args()
    prompts = [f"Name, age and job of the person in this sentence, as JSON: {line}" for line in sys.stdin]
    for result in helexa.batch(prompts, model=asked.model, schema=Person, temperature=0, max_tokens=120):
        person: Person = result.parsed
        print(person.model_dump_json())


if __name__ == "__main__":
    main()
