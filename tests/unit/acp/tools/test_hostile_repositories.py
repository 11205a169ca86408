"""Repositories that plant a program: reading tools and vetted commands never run it.

For each repository, a command without the agent's protection runs the program first, so the program would be found.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from helexa.acp.tools.bash import Bash
from helexa.acp.tools.boundary_and_secrets import Boundary
from helexa.acp.tools.vetted_commands import vetted_command
from nightly import NIGHTLY

_LINES = [
    *("pwd", "ls -la", "cat a.txt", "grep text a.txt", "git status", "git diff", "git diff HEAD", "git log -p"),
    *("git show HEAD:a.txt", "git blame a.txt", "git ls-files -o", "git branch -avv", "git status --ignored"),
    "git diff --cached",
]
if NIGHTLY:
    _LINES += ["head a.txt", "tail a.txt", "wc a.txt", "git log --all --oneline", "git show HEAD", "git rev-parse HEAD"]
_STATUS = ["git", "status"]
_DIFF = ["git", "diff"]


@dataclass
class Repository:
    """A git repository with a changed file `a.txt`, and a file `b.txt` that has only another date.

    Attributes:
        root: folder of the repository.
        program: program outside of the repository that creates a file.
        control: command line that runs the program if nothing prevents it.
        folder: folder in which the commands are run, relative to `root`.
        path: folders before the ordinary ones in the variable `PATH`.
        variables: further environment variables of the agent.
    """

    root: Path
    program: Path
    control: list[str]
    folder: str = "."
    path: str = ""
    variables: dict[str, str] = field(default_factory=dict)

    def git(self, *arguments: str, folder: str = ".", text: str | None = None) -> str:
        author = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "protocol.file.allow=always"]
        command = ["git", *author, *arguments]
        done = subprocess.run(command, cwd=self.root / folder, check=True, capture_output=True, text=True, input=text)
        return done.stdout.strip()

    def run_control(self, root: Path) -> None:
        """Run the control command in a copy of the repository."""
        subprocess.run(self.control, cwd=root / self.folder, capture_output=True, check=False, timeout=60)

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)
        (self.root / path).chmod(mode)

    def configure(self, text: str, path: str = ".git/config") -> None:
        with (self.root / path).open("a") as file:
            file.write(text)


def fsmonitor(repository: Repository) -> None:
    repository.configure(f"[core]\nfsmonitor = {repository.program}\n")


def fsmonitor_on_one_line_in_other_case(repository: Repository) -> None:
    repository.configure(f'[CORE] FsMonitor = "{repository.program}"\n')


def hooks_path(repository: Repository) -> None:
    repository.configure("[core]\nhooksPath = .githooks\n")
    repository.write(".githooks/post-index-change", repository.program.read_text(), 0o755)


def default_hook(repository: Repository) -> None:
    repository.write(".git/hooks/post-index-change", repository.program.read_text(), 0o755)


def include(repository: Repository) -> None:
    repository.configure("[include]\npath = ../.gitconfig\n")
    repository.write(".gitconfig", f"[core]\nfsmonitor = {repository.program}\n")


def include_if(repository: Repository) -> None:
    repository.configure('[includeIf "gitdir:**"]\npath = ../.gitconfig\n')
    repository.write(".gitconfig", f"[core]\nfsmonitor = {repository.program}\n")


def text_conversion(repository: Repository) -> None:
    repository.configure(f'[diff "a"]\ntextconv = {repository.program}\n')
    repository.write(".gitattributes", "*.txt diff=a\n")
    repository.control = _DIFF


def text_conversion_of_untracked_attributes(repository: Repository) -> None:
    repository.configure(f'[diff "a"]\ntextconv = {repository.program}\n')
    repository.write(".git/info/attributes", "*.txt diff=a\n")
    repository.control = _DIFF


def external_diff(repository: Repository) -> None:
    repository.configure(f"[diff]\nexternal = {repository.program}\n")
    repository.control = _DIFF


def diff_driver(repository: Repository) -> None:
    repository.configure(f'[diff "a"]\ncommand = {repository.program}\n')
    repository.write(".gitattributes", "*.txt diff=a\n")
    repository.control = _DIFF


def clean_filter(repository: Repository) -> None:
    repository.configure(f'[filter "a"]\nclean = {repository.program}\n')
    repository.write(".gitattributes", "*.txt filter=a\n")
    repository.control = _DIFF


def filter_process(repository: Repository) -> None:
    repository.configure(f'[filter "a"]\nprocess = {repository.program}\n')
    repository.write(".gitattributes", "*.txt filter=a\n")
    repository.control = _DIFF


def file_that_names_a_bare_repository(repository: Repository) -> None:
    fsmonitor(repository)
    (repository.root / ".git").rename(repository.root / ".bare")
    repository.write(".git", "gitdir: .bare\n")


def link_to_a_bare_repository(repository: Repository) -> None:
    fsmonitor(repository)
    (repository.root / ".git").rename(repository.root / ".bare")
    (repository.root / ".git").symlink_to(".bare")


def repository_files_beside_an_empty_folder(repository: Repository) -> None:
    fsmonitor(repository)
    repository.configure("[core]\nworktree = .\n")
    for entry in (repository.root / ".git").iterdir():
        entry.rename(repository.root / entry.name)


def bare_repository_in_a_subfolder(repository: Repository) -> None:
    shutil.copytree(repository.root / ".git", repository.root / "evil")
    repository.write(
        "evil/config", f"[core]\nrepositoryformatversion = 0\nworktree = .\nfsmonitor = {repository.program}\n"
    )
    repository.folder = "evil"


def _without_a_file_of_the_commit(repository: Repository, settings: str) -> None:
    """Make the repository a partial clone, in which git downloads the missing contents of `a.txt`."""
    blob = repository.git("rev-parse", "HEAD:a.txt")
    (repository.root / f".git/objects/{blob[:2]}/{blob[2:]}").unlink()
    repository.configure("[core]\nrepositoryformatversion = 1\n[extensions]\npartialClone = origin\n" + settings)
    repository.control = ["git", "show", "HEAD:a.txt"]


def download_with_its_own_program(repository: Repository) -> None:
    url = f"url = {repository.root}\nuploadpack = {repository.program}\n"
    _without_a_file_of_the_commit(repository, f'[remote "origin"]\npromisor = true\n{url}')


def download_through_its_own_ssh(repository: Repository) -> None:
    ssh = f"[core]\nsshCommand = {repository.program}\n"
    _without_a_file_of_the_commit(repository, f'{ssh}[remote "origin"]\npromisor = true\nurl = ssh://a.invalid/b\n')


def download_through_its_own_proxy(repository: Repository) -> None:
    proxy = f"[core]\ngitProxy = {repository.program}\n"
    _without_a_file_of_the_commit(repository, f'{proxy}[remote "origin"]\npromisor = true\nurl = git://a.invalid/b\n')


def download_through_an_external_protocol(repository: Repository) -> None:
    allowed = '[protocol "ext"]\nallow = always\n'
    url = f"url = ext::{repository.program}\n"
    _without_a_file_of_the_commit(repository, f'{allowed}[remote "origin"]\npromisor = true\n{url}')


def signature_check(repository: Repository) -> None:
    repository.configure(f"[log]\nshowSignature = true\n[gpg]\nprogram = {repository.program}\n")
    head, _, message = repository.git("cat-file", "commit", "HEAD").partition("\n\n")
    signature = "gpgsig -----BEGIN PGP SIGNATURE-----\n \n a\n -----END PGP SIGNATURE-----"
    signed = repository.git("hash-object", "-t", "commit", "-w", "--stdin", text=f"{head}\n{signature}\n\n{message}\n")
    repository.git("update-ref", "HEAD", signed)
    repository.control = ["git", "log"]


def _with_submodule(repository: Repository) -> None:
    shutil.copytree(repository.root, repository.root.parent / "other")
    repository.git("submodule", "add", "-q", "../other", "sub")
    repository.git("commit", "-qm", "sub")


def submodule(repository: Repository) -> None:
    _with_submodule(repository)
    repository.configure(f"[core]\nfsmonitor = {repository.program}\n", ".git/modules/sub/config")


def submodule_with_its_own_git_folder(repository: Repository) -> None:
    shutil.copytree(repository.root, repository.root / "sub")
    repository.git("-c", "advice.addEmbeddedRepo=false", "add", "sub")
    repository.git("commit", "-qm", "sub")
    repository.configure(f'[filter "a"]\nclean = {repository.program}\n', "sub/.git/config")
    repository.write("sub/.gitattributes", "*.txt filter=a\n")
    repository.write("sub/a.txt", "else\n")  # of the same size, so that git compares the contents


def submodule_in_a_split_index(repository: Repository) -> None:
    submodule_with_its_own_git_folder(repository)
    repository.git("update-index", "--split-index")


def settings_of_a_work_tree(repository: Repository) -> None:
    repository.configure("[extensions]\nworktreeConfig = true\n")
    repository.write(".git/config.worktree", f"[core]\nfsmonitor = {repository.program}\n")


def settings_of_another_folder(repository: Repository) -> None:
    text_conversion(repository)
    shutil.copytree(repository.root / ".git", repository.root / "evil")
    repository.write(".git/config", "[core]\nrepositoryformatversion = 0\n")
    repository.write(".git/commondir", "../evil\n")


def linked_work_tree_with_settings_of_another_folder(repository: Repository) -> None:
    repository.git("worktree", "add", "-q", "linked")
    repository.git("reset", "-q", "--hard", folder="linked")
    repository.write("linked/a.txt", "changed\n")
    shutil.copytree(repository.root / ".git", repository.root / "evil")
    repository.configure(f'[diff "a"]\ntextconv = {repository.program}\n', "evil/config")
    repository.write("linked/.gitattributes", "*.txt diff=a\n")
    repository.write(".git/worktrees/linked/commondir", "../../../evil\n")
    repository.write("linked/.git", "gitdir: ../.git/worktrees/linked\n")
    repository.folder, repository.control = "linked", _DIFF


def python_modules(repository: Repository) -> None:
    for name in ("msgspec", "pathspec", "re", "sitecustomize"):
        repository.write(f"{name}.py", f"import os\nos.system({str(repository.program)!r})\n")
    repository.control = ["python3", "-c", "import pathspec"]


def programs_of_vetted_names(repository: Repository) -> None:
    for name in ("git", "ls", "cat", "pwd", "grep"):
        repository.write(name, repository.program.read_text(), 0o755)
    repository.control, repository.path = ["sh", "-c", "cat a.txt"], "."


def programs_of_an_activated_environment(repository: Repository) -> None:
    for name in ("git", "ls", "cat", "pwd", "grep"):
        repository.write(f".venv/bin/{name}", repository.program.read_text(), 0o755)
    repository.control, repository.path = ["sh", "-c", "cat a.txt"], f"{repository.root}/.venv/bin"


def start_file_of_the_shell(repository: Repository) -> None:
    repository.write(".shell.sh", f"{repository.program}\n")
    repository.control, repository.variables = ["bash", "-c", "cat a.txt"], {"BASH_ENV": f"{repository.root}/.shell.sh"}


REPOSITORIES: list[Callable[[Repository], None]] = [
    *(fsmonitor, fsmonitor_on_one_line_in_other_case, hooks_path, default_hook, include, include_if, text_conversion),
    *(text_conversion_of_untracked_attributes, external_diff, diff_driver, clean_filter, filter_process),
    *(file_that_names_a_bare_repository, link_to_a_bare_repository, repository_files_beside_an_empty_folder),
    *(bare_repository_in_a_subfolder, download_with_its_own_program, download_through_its_own_ssh),
    *(download_through_its_own_proxy, download_through_an_external_protocol, signature_check, submodule),
    *(submodule_with_its_own_git_folder, submodule_in_a_split_index, settings_of_a_work_tree),
    *(settings_of_another_folder, linked_work_tree_with_settings_of_another_folder, python_modules),
    *(programs_of_vetted_names, programs_of_an_activated_environment, start_file_of_the_shell),
]


@pytest.mark.parametrize("plant", REPOSITORIES, ids=lambda plant: plant.__name__)
async def test_tools_that_read_run_no_program_named_by_a_hostile_repository(
    workplace: Any, monkeypatch: pytest.MonkeyPatch, plant: Callable[[Repository], None]
) -> None:
    root = workplace.folder
    program, mark = root.parent / "program", root.parent / "ran"
    program.write_text(f"#!/bin/sh\ntouch {mark}\nexit 1\n")
    program.chmod(0o755)
    repository = Repository(root, program, _STATUS)
    repository.git("init", "-q")
    repository.write("a.txt", "text\n")
    repository.write("b.txt", "text\n")
    repository.git("add", "a.txt", "b.txt")
    repository.git("commit", "-qm", "a")
    repository.write("a.txt", "changed\n")
    os.utime(root / "b.txt", (0, 0))  # `git status` writes the index, and runs its hook, only after such a change
    plant(repository)

    for name, value in repository.variables.items():
        monkeypatch.setenv(name, value)
    if repository.path:
        monkeypatch.setenv("PATH", f"{repository.path}{os.pathsep}{os.environ['PATH']}")
    copy = root.parent / "copy"
    shutil.copytree(root, copy, symlinks=True)
    repository.run_control(copy)
    assert mark.exists(), "the repository is harmless"
    mark.unlink()

    async def ignore(content: object) -> None:
        pass

    monkeypatch.chdir(root)
    boundary = workplace.context.boundary
    for path in {".", repository.folder}:
        await workplace.call("glob", pattern="*", path=path)
        await workplace.call("grep", pattern="text", path=path)
        await workplace.call("list_dir", path=path)
        await workplace.call("read_file", path="a.txt")
        for line in _LINES:
            if vetted_command(line, boundary.resolve(path).real, boundary) is not None:
                await Bash().run({"command": line, "cwd": path, "timeout": 60}, workplace.context, ignore)
    assert not mark.exists()


def test_git_needs_permission_in_a_repository_that_borrows_objects_of_another(tmp_path: Path) -> None:
    """Otherwise git could print files of any other repository of the user whose objects the repository borrows."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    assert vetted_command("git log", tmp_path, Boundary(tmp_path)) == "git log"
    (tmp_path / ".git/objects/info/alternates").write_text("/home/ada/other/.git/objects\n")
    assert vetted_command("git log", tmp_path, Boundary(tmp_path)) is None


@pytest.mark.parametrize(
    "path",
    [
        *(
            "objects",
            "objects/pack",
            "objects/info",
            "objects/ab/cd",
            "refs",
            "refs/heads",
            "refs/heads/a/b",
            "refs/hooks",
        ),
        *("HEAD", "packed-refs", "config", "index", "info", "info/attributes", "logs", "logs/HEAD", "worktrees/a"),
    ],
)
def test_git_needs_permission_in_a_repository_whose_git_folder_contains_links(tmp_path: Path, path: str) -> None:
    """A link can make git print the objects and references of any repository of the user."""
    git, elsewhere = tmp_path / "project/.git", tmp_path / "elsewhere"
    subprocess.run(["git", "init", "-q", git.parent], check=True)
    (git / "hooks/a").symlink_to("/dev/null")
    (git / path).parent.mkdir(parents=True, exist_ok=True)
    if not (git / path).exists():
        (git / path).touch()
    assert vetted_command("git log", git.parent, Boundary(git.parent)) == "git log"
    (git / path).rename(elsewhere)
    (git / path).symlink_to(elsewhere)
    assert vetted_command("git log", git.parent, Boundary(git.parent)) is None
