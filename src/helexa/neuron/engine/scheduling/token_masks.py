"""Checks the sampled tokens of a step against grammars, and makes masks for the rejected rows.

Tokens are sampled without masks first and then checked, which takes microseconds per token. A mask over the whole
vocabulary takes about a hundred times as long, so masks are computed for rejected tokens only.
"""

from helexa.neuron.engine.sampling.grammar_matcher import Mask
from helexa.neuron.engine.scheduling.plan import Plan


def refused(plan: Plan, tokens: list[int]) -> dict[int, Mask]:
    """Return masks of the allowed tokens, by row of the plan's logits, for the rows whose token is rejected.

    Tokens after a rejected draft are not used, and not checked.

    Args:
        tokens: one sampled token for each row.
    """
    masks: dict[int, Mask] = {}
    row = 0
    for entry in plan:
        count = len(entry.drafts) + 1 if entry.samples else 0
        guide = entry.sequence.guide
        if count and guide is not None:
            for offset, mask in guide.refused(tokens[row : row + count], entry.drafts).items():
                masks[row + offset] = mask
        row += count
    return masks
