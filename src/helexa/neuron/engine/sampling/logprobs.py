"""Computes log-probabilities of sampled tokens for the rows of logits that request them."""

import numpy as np
import torch
from torch import Tensor

from helexa.neuron.engine.ipc.messages import Logprob
from helexa.neuron.engine.step.readback import Readback
from helexa.neuron.ops.upload import upload


class Logprobs:
    """Computes the log-probabilities of the tokens that a step samples.

    The values are for temperature 1, without penalties, biases and grammars. Rows that do not request log-probabilities
    need no computation and no memory.

    Args:
        logits: [S, vocabulary], the model's logits for S rows, of any float dtype. The sampler may change them later.
        alternatives: number of likeliest tokens to report, by row. Rows that request no log-probabilities have no
            entry.
    """

    def __init__(self, logits: Tensor, alternatives: dict[int, int]) -> None:
        self._alternatives = alternatives
        if self._alternatives:
            self._rows = upload(np.array(list(alternatives)), logits.device)
            self._table = torch.log_softmax(logits[self._rows].float(), dim=-1)

    def begin(self, chosen: Tensor) -> None:
        """Launch the computation of the log-probabilities without waiting for the device.

        Args:
            chosen: int64 [S], the sampled token of each row, on the device.
        """
        if self._alternatives:
            top = self._table.topk(min(max(self._alternatives.values()), self._table.shape[1]))
            chosen_logprobs = self._of_tokens(chosen[self._rows])
            self._begun = [Readback(tensor) for tensor in (chosen, chosen_logprobs, top.indices, top.values)]

    def read(self, tokens: list[int]) -> dict[int, Logprob]:
        """Wait for the log-probabilities, and return them by row for the rows that request them.

        Args:
            tokens: the final token of each row. It differs from the token that was given to `begin` if a grammar
                rejected that token. Rows with a negative token are omitted.

        Returns:
            The log-probability of the row's token and the likeliest tokens, by row.
        """
        if not self._alternatives:
            return {}
        chosen, logprobs, *top = (copy.wait().tolist() for copy in self._begun)
        if tokens != chosen:
            logprobs = self._of_tokens(torch.tensor(tokens, device=self._table.device)[self._rows]).tolist()
        return {
            row: (logprob, list(zip(ids[:count], values[:count], strict=True)))
            for (row, count), logprob, ids, values in zip(self._alternatives.items(), logprobs, *top, strict=True)
            if tokens[row] >= 0
        }

    def _of_tokens(self, tokens: Tensor) -> Tensor:
        return self._table.gather(1, tokens.clamp(min=0).unsqueeze(1)).squeeze(1)
