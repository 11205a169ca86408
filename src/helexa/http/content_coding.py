"""Decodes compressed request bodies in pieces of limited size.

A small body can decode to gigabytes. Between two pieces, the server can check its memory limit and reject the body.
"""

import zlib
from typing import Any

from helexa.core.errors import ApiError

try:  # in Python's library since version 3.14
    from compression import zstd  # pyright: ignore[reportMissingImports]
except ImportError:
    try:
        from backports import zstd
    except ImportError:
        zstd = None

# Supported encodings: the header `Accept-Encoding` of the error response to a body with another encoding.
ACCEPTED = "gzip, deflate" if zstd is None else "gzip, deflate, zstd"

PIECE_BYTES = 256 << 10  # maximum size of a decoded piece

_GZIP = 16 + zlib.MAX_WBITS
_WINDOW_LOG = 23  # RFC 9659: at most 8 MiB
_SMALL_WINDOW_BYTES = 64 << 10


class BodyDecoder:
    """Decodes one request body, whose encoding `coding` is one of `ACCEPTED`."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._decoder: Any = None
        self._input = b""
        self._may_hold_output = False
        # maximum number of bytes of memory that the decoder itself uses
        self.window_bytes = 1 << _WINDOW_LOG if coding == "zstd" else _SMALL_WINDOW_BYTES

    def feed(self, data: bytes) -> None:
        """Append received bytes of the compressed body."""
        self._input += data

    def read(self) -> bytes:
        """Return 1 to `PIECE_BYTES` decoded bytes, or b"" if none can be decoded now.

        Raises:
            ApiError: status 400: the input is not valid.
        """
        while self._input or not self._needs_input():
            if self._decoder is None or self._decoder.eof:
                self._decoder = self._next_decoder()
                if self._decoder is None:
                    return b""
            try:
                piece = self._decoder.decompress(self._input, PIECE_BYTES)
            except Exception as error:  # zlib.error, or zstd's own class
                raise self._invalid() from error
            decoder = self._decoder
            self._input = decoder.unused_data if decoder.eof else getattr(decoder, "unconsumed_tail", b"")
            # After a full piece, zlib may hold up to 258 bytes more although it has consumed all input.
            self._may_hold_output = len(piece) == PIECE_BYTES
            if piece:
                return piece
        return b""

    def finish(self) -> None:
        """After the last `read`, raise ApiError 400 unless the input is complete or empty."""
        if self._input or not (self._decoder is None or self._decoder.eof):
            raise self._invalid()

    def _needs_input(self) -> bool:
        """Return whether the decoder has no output without further input."""
        decoder = self._decoder
        return decoder is None or decoder.eof or getattr(decoder, "needs_input", not self._may_hold_output)

    def _next_decoder(self) -> Any:
        """Return the decoder of the next gzip member, zstd frame or deflate stream.

        Return None if the first two bytes of a deflate stream, which select the decoder, have not arrived yet.
        """
        if self._decoder is not None and self._coding == "deflate":
            raise self._invalid()  # bytes after the end of the deflate stream
        if self._coding == "gzip":
            return zlib.decompressobj(_GZIP)
        if self._coding == "zstd" and zstd is not None:
            return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG})
        if len(self._input) < 2:
            return None
        has_header = self._input[0] & 15 == 8 and int.from_bytes(self._input[:2]) % 31 == 0
        return zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)  # some clients omit zlib's header

    def _invalid(self) -> ApiError:
        message = f"the request body is not valid {self._coding} data; send it without a content-encoding"
        return ApiError(400, "invalid_content_encoding", message)
