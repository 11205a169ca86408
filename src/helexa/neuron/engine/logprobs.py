"""What the model itself thinks of tokens: log-probabilities, for the rows that ask for them."""

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from helexa.neuron.engine.messages import Logprob
from helexa.neuron.engine.sampler import Row


class Logprobs:
    """Log-probabilities of a step, before temperature, penalties and whatever else chooses; nothing is kept or computed
    for rows that do not ask.

    Args:
        logits: [S, vocabulary], any float dtype, as the model computed them; the sampler may change them afterwards.
        rows: what the S rows are for.
    """

    def __init__(self, logits: Tensor, rows: Rows[Row]) -> None:
        self._alternatives = {i: row.params.logprobs for i, row in enumerate(rows) if row.params.logprobs is not None}
        if self._alternatives:
            self._table = torch.log_softmax(logits[list(self._alternatives)].float(), dim=-1)

    def of(self, tokens: list[int]) -> dict[int, Logprob]:
        """For each row that asks: that of the token chosen for it, and the likeliest ones, those first.

        Args:
            tokens: one for each row; of one that is no token nothing is said.
        """
        if not self._alternatives:
            return {}
        chosen = torch.tensor([tokens[row] for row in self._alternatives], device=self._table.device)
        own = self._table.gather(1, chosen.clamp(min=0).unsqueeze(1)).squeeze(1).tolist()
        most = min(max(self._alternatives.values()), self._table.shape[1])
        top = self._table.topk(most)
        likeliest = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return {
            row: (logprob, list(zip(ids[:count], values[:count], strict=True)))
            for (row, count), logprob, (ids, values) in zip(self._alternatives.items(), own, likeliest, strict=True)
            if tokens[row] >= 0
        }
