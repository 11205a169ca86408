"""All quirks by the name of the model that the emulated backend answers with."""

from emulator import message_quirks, stream_quirks
from emulator.quirk import Quirk

QUIRKS: dict[str, Quirk] = {
    f"quirk-{number:03}": quirk for number, quirk in enumerate((*stream_quirks.QUIRKS, *message_quirks.QUIRKS))
}
