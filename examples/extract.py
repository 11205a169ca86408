"""Extract facts from texts. Each answer is an instance of a pydantic model.

echo "Ann Miller, 31, is a baker in York." | python examples/extract.py
"""

import argparse
import sys

from pydantic import BaseModel, Field

import helexa


class Person(BaseModel):
    """The facts to extract from a line. Length limits are needed because a small model may never end a text."""

    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=150)
    job: str = Field(max_length=40)


def main() -> None:
    """Read lines from stdin, and print the person that each line describes as a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    asked = parser.parse_args()
    prompts = [f"Name, age and job of the person in this sentence, as JSON: {line}" for line in sys.stdin]
    for result in helexa.batch(prompts, model=asked.model, schema=Person, temperature=0, max_tokens=120):
        person: Person = result.parsed
        print(person.model_dump_json())


if __name__ == "__main__":
    main()
