"""Sends and receives hidden states between stages, as raw frames of float32 numbers."""

import torch
from torch import Tensor

from helexa.neuron.engine.ipc.channel import Channel, ChannelError

_PIECE_BYTES = 16 << 20


def send_hidden(channel: Channel, hidden: Tensor) -> None:
    """Send hidden states [rows, H]. If there are no rows, an empty frame is sent, so that the receiver waits for it.

    Raises:
        ChannelError: the connection is closed.
    """
    data = _bytes_of(hidden.to("cpu", torch.float32).contiguous())
    for start in range(0, max(len(data), 1), _PIECE_BYTES):
        channel.send_bytes(data[start : start + _PIECE_BYTES])


def receive_hidden(channel: Channel, rows: int, width: int) -> Tensor:
    """Wait for the hidden states that the other end sends with `send_hidden`, and return them, [rows, width].

    Raises:
        ChannelError: the connection is closed, or the other end has sent another number of rows.
    """
    hidden = torch.empty(rows, width)
    data = _bytes_of(hidden)
    filled = 0
    while True:
        piece = channel.receive_bytes()
        if len(piece) != min(len(data) - filled, _PIECE_BYTES):
            raise ChannelError(f"the other stage sent {len(piece)} bytes of hidden states at {filled} of {len(data)}")
        data[filled : filled + len(piece)] = piece
        filled += len(piece)
        if filled == len(data):
            return hidden


def _bytes_of(hidden: Tensor) -> memoryview:
    return hidden.view(-1).view(torch.uint8).numpy().data
