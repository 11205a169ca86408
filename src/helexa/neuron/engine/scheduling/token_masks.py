"""Checks the sampled tokens of a step against grammars, and computes masks for rejected tokens.

Tokens are sampled without a mask first. The grammar then checks the sampled token, which takes microseconds. To compute
a mask over the whole vocabulary takes about a hundred times as long, so this is done only for rejected tokens.
"""

from helexa.neuron.engine.sampling.grammar_matcher import Mask
from helexa.neuron.engine.scheduling.plan import Plan


def rejection_masks(plan: Plan, tokens: list[int]) -> dict[int, Mask]:
    """Return a mask of the allowed tokens for each row of logits whose sampled token violates the sequence's grammar.

    Tokens after a rejected draft are not checked, because they are not used.

    Args:
        plan: the plan of the step.
        tokens: the sampled token of each row of logits.

    Returns:
        Masks by row number, for the rows with a violation only.
    """
    masks: dict[int, Mask] = {}
    row = 0
    for entry in plan:
        count = len(entry.drafts) + 1 if entry.samples else 0
        matcher = entry.sequence.matcher
        if count and matcher is not None:
            for offset, mask in matcher.rejection_masks(tokens[row : row + count], entry.drafts).items():
                masks[row + offset] = mask
        row += count
    return masks
