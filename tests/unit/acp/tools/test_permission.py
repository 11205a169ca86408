"""Permission rulings by mode, and the scopes of "always" answers."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from helexa.acp.config import Mode
from helexa.acp.host.boundary import ResolvedPath
from helexa.acp.tools.permission import decide
from helexa.acp.tools.tool import Act, Allowed, AskUser, Calls, Denied, Fetches, Reads, Runs, Scope, Writes


@dataclass
class Remembered:
    """The user's answers, by tool and subject."""

    answers: dict[tuple[str, str], bool] = field(default_factory=dict)

    def ruling(self, scope: Scope) -> bool | None:
        return self.answers.get((scope.tool, scope.subject))

    def always(self, act: Act, mode: Mode = "default", *, allowed: bool = True) -> Scope:
        """Save an "always" answer for an act, and return its scope."""
        ruling = decide(act, mode, self)
        assert isinstance(ruling, AskUser)
        self.answers[ruling.scope.tool, ruling.scope.subject] = allowed
        return ruling.scope


def write(path: str, *, plans: bool = False) -> Writes:
    file = Path(path)
    return Writes(ResolvedPath(file, file, plans=plans, guarded=".git" in file.parts))


_HOME = Path("/home/ada")
_WRITE = write("/home/ada/src/a.py")
_PLAN = write("/plans/plan.md", plans=True)
_HOOK = write("/home/ada/.git/hooks/pre-commit")


@pytest.mark.parametrize(
    ("act", "default", "edits", "plan", "bypass"),
    [
        (Reads(), Allowed, Allowed, Allowed, Allowed),
        (_WRITE, AskUser, Allowed, Denied, Allowed),
        (_PLAN, Allowed, Allowed, Allowed, Allowed),
        (_HOOK, AskUser, AskUser, Denied, Allowed),
        (Runs("ls", _HOME), AskUser, AskUser, Denied, Allowed),
        (Fetches("example.com"), AskUser, AskUser, AskUser, Allowed),
        (Calls("mcp__a__b", only_reads=False), AskUser, AskUser, Denied, Allowed),
        (Calls("mcp__a__b", only_reads=True), AskUser, AskUser, AskUser, Allowed),
    ],
)
def test_ruling_by_mode(act: Act, default: type, edits: type, plan: type, bypass: type) -> None:
    rulings = [
        type(decide(act, mode, Remembered())) for mode in ("default", "acceptEdits", "plan", "bypassPermissions")
    ]
    assert rulings == [default, edits, plan, bypass]


def test_always_allow_of_an_edit_covers_the_folder_below() -> None:
    remembered = Remembered()
    assert remembered.always(_WRITE).label == "edits in src/"
    assert isinstance(decide(write("/home/ada/src/b/c.py"), "default", remembered), Allowed)
    assert isinstance(decide(write("/home/ada/b.py"), "default", remembered), AskUser)
    assert isinstance(decide(write("/home/ada/src2/b.py"), "default", remembered), AskUser)
    assert isinstance(decide(write("/home/ada/src/.git/config"), "default", remembered), AskUser)
    assert isinstance(decide(_WRITE, "plan", remembered), Denied)


def test_permanent_rejection_holds_in_bypass_mode() -> None:
    remembered = Remembered()
    remembered.always(Runs("git push origin", _HOME), allowed=False)
    for mode in ("default", "bypassPermissions"):
        assert isinstance(decide(Runs("git push origin", _HOME), mode, remembered), Denied)
    assert isinstance(decide(Runs("git add .", _HOME), "default", remembered), AskUser)


def test_always_allow_covers_a_vetted_command_in_the_project() -> None:
    remembered = Remembered()
    scope = remembered.always(Runs("git diff --stat", _HOME, "git diff"))
    assert (scope.subject, scope.label, scope.persistent) == (
        "git diff *",
        "`git diff` that only reads, in this project",
        True,
    )
    assert isinstance(decide(Runs("git diff a.txt", _HOME / "src", "git diff"), "default", remembered), Allowed)
    assert isinstance(decide(Runs("git diff --output=x", _HOME), "default", remembered), AskUser)
    assert isinstance(decide(Runs("git log", _HOME, "git log"), "default", remembered), AskUser)


def test_always_allow_of_other_line_covers_only_this_line_and_session() -> None:
    remembered = Remembered()
    scope = remembered.always(Runs("make test\n", _HOME))
    assert (scope.label, scope.persistent) == ("exactly this command, in this session", False)
    assert isinstance(decide(Runs("make test", _HOME), "default", remembered), Allowed)
    assert isinstance(decide(Runs("make test x", _HOME), "default", remembered), AskUser)
    assert isinstance(decide(Runs("make test", _HOME / "src"), "default", remembered), AskUser)


def test_hosts_and_server_tools_have_separate_grants() -> None:
    remembered = Remembered()
    remembered.always(Fetches("example.com"))
    remembered.always(Calls("mcp__a__b", only_reads=False))
    assert isinstance(decide(Fetches("example.com"), "default", remembered), Allowed)
    assert isinstance(decide(Fetches("example.com.evil.org"), "default", remembered), AskUser)
    assert isinstance(decide(Calls("mcp__a__c", only_reads=False), "default", remembered), AskUser)
    assert isinstance(decide(Calls("mcp__a__b", only_reads=False), "plan", remembered), Denied)
