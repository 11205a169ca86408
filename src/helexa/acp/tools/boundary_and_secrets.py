"""The folders that tools may access, and which of their files are protected.

Guarded files (`is_guarded`) run code later, when the user opens the folder, commits, or starts a shell. The agent
always asks before it writes a guarded file, even if the user allowed all edits, except in the mode
`bypassPermissions`.

The agent reads files with secrets (`is_secret`) only if the user allows it, because it sends their contents to the
endpoint of the model. All names in this module are in lower case, because some file systems ignore case.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePath

from helexa.acp.host import ToolError

_GUARDED_FOLDERS = frozenset(
    [
        *(".git", ".hg", ".svn", ".jj", ".husky", ".githooks"),  # hooks
        *(".vscode", ".zed", ".idea", ".fleet", ".nvim", ".vim", ".emacs.d", ".devcontainer", ".settings"),  # editors
        *(".claude", ".codex", ".cursor", ".gemini", ".opencode", ".continue", ".windsurf", ".cline", ".roo"),  # agents
        *(".ssh", ".gnupg", ".aws", ".docker", ".kube", ".cargo", ".yarn", ".bundle", ".mvn", "cron.d"),
        *(".circleci", ".buildkite", ".gitea", ".forgejo", ".woodpecker"),  # continuous integration
    ]
)
_GUARDED_SUBFOLDERS = frozenset(
    [
        *((".github", "workflows"), (".github", "actions"), (".config", "fish"), (".config", "systemd")),
        *((".config", "autostart"), (".config", "git"), (".config", "nvim"), (".config", "environment.d")),
        *((".config", "helexa-acp"), ("share", "helexa-acp")),  # the agent's own settings and permissions
    ]
)
_FILES = frozenset(
    [
        *(".envrc", ".direnvrc", ".tool-versions", "mise.toml", ".mise.toml", "mise.local.toml"),
        *(".gitmodules", ".gitattributes", ".gitconfig", ".hgrc", ".pre-commit-config.yaml", ".pre-commit-hooks.yaml"),
        *("lefthook.yml", ".lefthook.yml", "lefthook.yaml", "lefthook-local.yml", "lefthook.toml"),
        *(".mcp.json", "mcp.json", ".devcontainer.json", ".cursorrules", ".aider.conf.yml", "opencode.json"),
        *(".bashrc", ".bash_profile", ".bash_login", ".bash_logout", ".bash_aliases", ".profile", ".zshrc", ".zshenv"),
        *(".zprofile", ".zlogin", ".zlogout", ".kshrc", ".cshrc", ".tcshrc", ".login", ".logout", ".inputrc"),
        *(".xprofile", ".xinitrc", ".xsession", ".tmux.conf", ".screenrc", "authorized_keys", "crontab"),
        *(".vimrc", ".exrc", ".nvimrc", ".nvim.lua", ".emacs", ".dir-locals.el", ".gdbinit", ".lldbinit"),
        *(
            ".pythonrc",
            ".pythonrc.py",
            ".pdbrc",
            ".irbrc",
            ".rprofile",
            ".ghci",
            "sitecustomize.py",
            "usercustomize.py",
        ),
        *(".npmrc", ".yarnrc", ".yarnrc.yml", ".pnpmfile.cjs", ".pnp.cjs", ".pypirc", "pip.conf", ".netrc", ".curlrc"),
        *(".wgetrc", ".gitlab-ci.yml", ".travis.yml", ".drone.yml", ".woodpecker.yml", ".cirrus.yml", "appveyor.yml"),
        *("azure-pipelines.yml", "bitbucket-pipelines.yml", "jenkinsfile"),
        *("agents.md", "claude.md", "gemini.md", "copilot-instructions.md", ".windsurfrules", ".clinerules"),
    ]
)
_SUFFIXES = (".pth", ".code-workspace")
# Files that users run by habit, for example with `make`. They are guarded only if they are new. Most projects have such
# files, so a question before each edit of an existing file would be too frequent.
_FILES_IF_NEW = frozenset(
    [
        *("gnumakefile", "makefile", "justfile", ".justfile", "taskfile.yml", "taskfile.yaml", "rakefile", "tasks.py"),
        *("package.json", "gulpfile.js", "gruntfile.js", "conftest.py", "setup.py", "noxfile.py", "build.rs"),
        *("vagrantfile", "flake.nix", "shell.nix", "default.nix"),
    ]
)


def is_guarded(path: PurePath, *, new: bool = False) -> bool:
    """Return whether the file at `path` may later run code, or instruct an agent.

    `path` is relative to the session's folder. `new` is True if the file does not exist yet. For example, the user's
    next `make` would run a new `Makefile`.
    """
    parts = [part.lower() for part in path.parts]
    if not parts:
        return False
    return (
        not _GUARDED_FOLDERS.isdisjoint(parts)
        or not _GUARDED_SUBFOLDERS.isdisjoint(pairwise(parts))
        or parts[-1] in _FILES
        or (new and parts[-1] in _FILES_IF_NEW)
        or parts[-1].endswith(_SUFFIXES)
    )


_SECRET_FOLDERS = frozenset(
    [".ssh", ".gnupg", ".aws", ".azure", ".gcloud", ".kube", ".docker", ".password-store", ".secrets"]
)
_SECRET_SUBFOLDERS = frozenset([(".config", "gcloud"), (".config", "gh"), (".config", "hub")])
_NAMES = re.compile(
    r"\.env|\.env\..*|.*\.env|\.envrc|\.dev\.vars|\.?secrets?\.(json|toml|ya?ml|ini|properties)|\.?credentials"
    r"|\.?credentials\.(json|toml|ya?ml|ini|db)|client_secret.*\.json|service[-_]?account.*\.json|local\.settings\.json"
    r"|id_(rsa|dsa|ecdsa|ed25519)(_sk)?|.*\.(pem|key|p12|pfx|p8|pk8|ppk|jks|keystore|kdbx?|gpg|age|ovpn|tfstate|tfvars)"
    r"|\.?netrc|\.git-credentials|\.npmrc|\.yarnrc\.yml|\.pypirc|\.pgpass|\.my\.cnf|\.htpasswd|\.vault-token|\.dockercfg"
    r"|\.s3cfg|\.boto|auth\.json|kubeconfig|shadow|wallet\.dat"
)
_EXAMPLES = re.compile(r".*[.-](example|sample|template|dist|defaults?|pub)")


def is_secret(path: PurePath) -> bool:
    """Return whether the file at `path` usually contains secrets.

    The result is False for examples, such as `.env.example`, and for public keys, such as `id_rsa.pub`. `path` must be
    relative to the session's folder. With an absolute path, the result would be True for all files of a session in
    `~/.docker/a`.
    """
    parts = [part.lower() for part in path.parts]
    if not parts or _EXAMPLES.fullmatch(parts[-1]):
        return False
    return (
        not _SECRET_FOLDERS.isdisjoint(parts[:-1])
        or not _SECRET_SUBFOLDERS.isdisjoint(pairwise(parts[:-1]))
        or parts[-2:] == [".git", "config"]  # URLs of remote repositories can contain tokens
        or _NAMES.fullmatch(parts[-1]) is not None
    )


class OutOfBounds(ToolError):
    """A path is invalid, or is outside the folders that the session may access."""


@dataclass(frozen=True, slots=True)
class ResolvedPath:
    """A path within the folders that the session may access; it need not exist."""

    real: Path  # path with all symbolic links resolved, for local file access
    # The same path for requests to the editor and for display. Symbolic links in the session's folder are not resolved,
    # so the path begins as the editor wrote the folder.
    path: Path
    plans: bool = False  # whether the path is in the folder of the agent's plans, which the editor cannot access
    guarded: bool = False  # whether a file at the path may run code later, for example in `.git` (see `is_guarded`)
    secret: bool = False  # whether a file at the path usually contains secrets (see `is_secret`)
    folder: Path | None = None  # the folder of the session that contains the path, or None for the folder of plans

    @property
    def below(self) -> Path:
        """The path relative to the session's folder, or the name in the folder of plans."""
        return Path(self.path.name) if self.folder is None else self.path.relative_to(self.folder)

    def is_folder(self) -> bool:
        """Return whether a readable folder exists at the path."""
        try:
            return self.real.is_dir()
        except OSError:
            return False

    def exists(self) -> bool:
        """Return whether a file or folder exists at the path."""
        try:
            return self.real.exists()
        except OSError:
            return False


class Boundary:
    """The folders that one session may access.

    The session may also access `plans`, the folder of the agent's plans. The folders can contain files of the agent
    itself (`own`), such as its configuration with API keys. These files count as guarded and as secret.
    """

    def __init__(
        self, cwd: Path, additional: Iterable[Path] = (), plans: Path | None = None, own: Iterable[Path] = ()
    ) -> None:
        self.cwd = cwd  # the working directory, as the editor wrote it
        # files and folders of the agent itself, with symbolic links resolved
        self.own = tuple(Path(os.path.realpath(path)) for path in own)
        self._folders = [(Path(os.path.realpath(folder)), folder) for folder in dict.fromkeys((cwd, *additional))]
        self._plans = plans
        self._real_plans = Path(os.path.realpath(plans)) if plans else None

    @property
    def folders(self) -> list[Path]:
        """The working directory and the additional folders, as the editor wrote them."""
        return [folder for _, folder in self._folders]

    def resolve(self, text: str) -> ResolvedPath:
        """Resolve a path that the model wrote, and check that the session may access it.

        Args:
            text: an absolute path, a path that begins with `~` or `$HOME`, or a path relative to the working directory.

        Raises:
            OutOfBounds: `text` is not a path, or the path is outside the session's folders.
        """
        for home in ("~", "$HOME", "${HOME}"):
            if text == home or text.startswith(f"{home}/"):
                text = str(Path.home()) + text[len(home) :]
        try:
            os.fsencode(text)
            real = Path(os.path.realpath(self.cwd / text))
        except (ValueError, OSError) as error:  # NUL, lone surrogate, or loop of links
            raise OutOfBounds(f"{text!r} is not a path; write a path such as src/app.py") from error
        if self._real_plans is not None and self._plans is not None and real.is_relative_to(self._real_plans):
            return ResolvedPath(real, self._plans / real.relative_to(self._real_plans), plans=True)
        for root, folder in self._folders:
            if real.is_relative_to(root):
                below = real.relative_to(root)
                own = any(real.is_relative_to(path) for path in self.own)
                return ResolvedPath(
                    real,
                    folder / below,
                    guarded=own or is_guarded(below, new=not os.path.lexists(real)),
                    # `.env` can be a link to a file with another name, so the path before the resolution counts, too.
                    secret=own or is_secret(below) or is_secret(self._written(text)),
                    folder=folder,
                )
        allowed = ", ".join(str(folder) for folder in self.folders)
        raise OutOfBounds(f"{text} is outside of this session's folders; use paths in {allowed}")

    def _written(self, text: str) -> Path:
        """Return the path `text` relative to the folder of the session that contains it.

        Links are not resolved. For a path outside all folders of the session, the result is only its file name.
        """
        path = Path(os.path.normpath(self.cwd / text))
        for folder in (folder for pair in self._folders for folder in pair):
            if path.is_relative_to(folder):
                return path.relative_to(folder)
        return Path(path.name)  # a link outside of the session's folders, which leads into one of the folders

    def brief(self, path: Path) -> str:
        """Return a path for display, relative to the working directory if below it."""
        return str(path.relative_to(self.cwd)) if path.is_relative_to(self.cwd) else str(path)
