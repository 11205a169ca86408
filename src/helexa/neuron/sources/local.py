"""Sources of the form `file:PATH`: models on this machine."""

from pathlib import Path

from helexa.core.errors import SourceError
from helexa.neuron.cache_folder import expanded


def local_model(name: str) -> Path:
    """Return the absolute path of the GGUF file or checkpoint folder at the path `name`.

    Raises:
        SourceError: `name` is not the path of a GGUF file or a checkpoint folder. `kind` is `invalid_source`.
    """
    path = expanded(Path(name)).absolute()
    try:
        return _check_model(path)
    except OSError as error:
        raise _invalid(path, f"cannot be read: {error.strerror}") from error


def _check_model(path: Path) -> Path:
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        files = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; name the file itself, {files[0]}" if files else ""
        raise _invalid(path, f"is a folder without config.json{hint}")
    if not path.exists():
        raise _invalid(path, "does not exist")
    if path.suffix.lower() != ".gguf":
        raise _invalid(path, "is neither a .gguf file nor a folder with config.json")
    return path


def _invalid(path: Path, reason: str) -> SourceError:
    return SourceError(f"{path} {reason}", kind="invalid_source", model_id=f"file:{path}")
