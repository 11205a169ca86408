"""Ask the same question several times and take the answer that most agree on (self-consistency).

    python examples/vote.py "What is 17 + 25?" --choices 41 42 43

The model thinks aloud in each of its answers, then each is asked for its result alone.
"""

import argparse
from collections import Counter

import helexa


def main() -> None:
    """Ask, count, print the winner and the votes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question")
    parser.add_argument("--choices", nargs="+", required=True)
    parser.add_argument("-n", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200, help="that the model may think in each answer")
    parser.add_argument("--model")
    asked = parser.parse_args()
    thoughts = helexa.generate(
        f"{asked.question} Think step by step.", n=asked.n, model=asked.model, temperature=0.8, max_tokens=asked.tokens
    )
    verdicts = [
        [
            {"role": "user", "content": asked.question},
            {"role": "assistant", "content": thought.text},
            {"role": "user", "content": "So what is the answer?"},
        ]
        for thought in thoughts.choices
    ]
    schema = {"enum": asked.choices}
    answers = helexa.batch(verdicts, model=asked.model, schema=schema, temperature=0, max_tokens=40)
    votes = Counter(answer.parsed for answer in answers)
    print(votes.most_common(1)[0][0])
    print(", ".join(f"{choice}: {count}" for choice, count in votes.most_common()))


if __name__ == "__main__":
    main()
