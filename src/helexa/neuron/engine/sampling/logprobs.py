"""What the model itself thinks of tokens: log-probabilities, for the rows that ask for them."""

import numpy as np
import torch
from torch import Tensor

from helexa.neuron.engine.ipc.messages import Logprob
from helexa.neuron.engine.step.readback import Readback
from helexa.neuron.ops.upload import upload


class Logprobs:
    """Log-probabilities of a step, before temperature, penalties and whatever else chooses; nothing is kept or computed
    for rows that do not ask.

    Args:
        logits: [S, vocabulary], any float dtype, as the model computed them; the sampler may change them afterwards.
        alternatives: see `Sampling.logprobs`.
    """

    def __init__(self, logits: Tensor, alternatives: dict[int, int]) -> None:
        self._alternatives = alternatives
        if self._alternatives:
            self._rows = upload(np.array(list(alternatives)), logits.device)
            self._table = torch.log_softmax(logits[self._rows].float(), dim=-1)

    def begin(self, chosen: Tensor) -> None:
        """Compute what `of` tells, without waiting for the device.

        Args:
            chosen: the tokens [S] on the device.
        """
        if self._alternatives:
            top = self._table.topk(min(max(self._alternatives.values()), self._table.shape[1]))
            own = self._of_tokens(chosen[self._rows])
            self._begun = [Readback(part) for part in (chosen, own, top.indices, top.values)]

    def of(self, tokens: list[int]) -> dict[int, Logprob]:
        """For each row that asks: that of the token chosen for it, and the likeliest ones, those first.

        Args:
            tokens: one for each row, chosen on the device or instead of one that was; of one that is no token nothing
                is said.
        """
        if not self._alternatives:
            return {}
        chosen, own, *top = (part.wait().tolist() for part in self._begun)
        if tokens != chosen:
            own = self._of_tokens(torch.tensor(tokens, device=self._table.device)[self._rows]).tolist()
        return {
            row: (logprob, list(zip(ids[:count], values[:count], strict=True)))
            for (row, count), logprob, ids, values in zip(self._alternatives.items(), own, *top, strict=True)
            if tokens[row] >= 0
        }

    def _of_tokens(self, tokens: Tensor) -> Tensor:
        return self._table.gather(1, tokens.clamp(min=0).unsqueeze(1)).squeeze(1)
