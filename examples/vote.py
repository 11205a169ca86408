"""Ask the model the same question several times, and print the most frequent answer (self-consistency).

    python examples/vote.py "What is 17 + 25?" --choices 41 42 43

In the first request, the model writes several answers with its reasoning. For each of them, a second request asks for
the result, which must be one of the choices.
"""

import argparse
from collections import Counter

import helexa


def main() -> None:
    """Ask the question, count the answers, and print the most frequent answer and all counts."""
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
