"""What grammars refuse of the tokens that a step has chosen, and what they leave instead.

A token is chosen first, as if there were no grammar, and shown to it: that costs microseconds. A mask of the whole
vocabulary, and what is done with it, costs a hundred times that, and is needed where a token is refused alone.
"""

from helexa.neuron.engine.sampling.grammar_matcher import Mask
from helexa.neuron.engine.scheduling.plan import Plan


def refused(plan: Plan, tokens: list[int]) -> dict[int, Mask]:
    """By row of a plan's logits, what may be chosen where `tokens`, one for each row, are none of it.

    What is sampled after a draft that was not kept is of no account, and not looked at.
    """
    masks: dict[int, Mask] = {}
    row = 0
    for entry in plan:
        count = len(entry.drafts) + 1 if entry.samples else 0
        guide = entry.sequence.guide
        if count and guide is not None:
            for place, mask in guide.refused(tokens[row : row + count], entry.drafts).items():
                masks[row + place] = mask
        row += count
    return masks
