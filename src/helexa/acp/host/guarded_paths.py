"""Paths of files that programs run or follow without being asked, such as hooks and settings of editors.

The agent always asks before it writes these files, even if the user allowed all edits: a written file would run code
later, when the user opens the folder, commits, or starts a shell. All names are in lower case, because some file
systems ignore case.
"""

from itertools import pairwise
from pathlib import PurePath

_FOLDERS = frozenset(
    [
        *(".git", ".hg", ".svn", ".jj", ".husky", ".githooks"),  # hooks
        *(".vscode", ".zed", ".idea", ".fleet", ".nvim", ".vim", ".emacs.d", ".devcontainer", ".settings"),  # editors
        *(".claude", ".codex", ".cursor", ".gemini", ".opencode", ".continue", ".windsurf", ".cline", ".roo"),  # agents
        *(".ssh", ".gnupg", ".aws", ".docker", ".kube", ".cargo", ".yarn", ".bundle", ".mvn", "cron.d"),
        *(".circleci", ".buildkite", ".gitea", ".forgejo", ".woodpecker"),  # continuous integration
    ]
)
_SUBFOLDERS = frozenset(
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
    ]
)
_SUFFIXES = (".pth", ".code-workspace")


def is_guarded(path: PurePath) -> bool:
    """Return whether a program may run or follow the file at `path`, which is relative to a session's folder."""
    parts = [part.lower() for part in path.parts]
    if not parts:
        return False
    return (
        not _FOLDERS.isdisjoint(parts)
        or not _SUBFOLDERS.isdisjoint(pairwise(parts))
        or parts[-1] in _FILES
        or parts[-1].endswith(_SUFFIXES)
    )
