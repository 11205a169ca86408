"""Permission rulings by mode, and the scopes of "always" answers."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from helexa.acp.tools.boundary_and_secrets import ResolvedPath
from helexa.acp.tools.permission_rules import Allowed, AskUser, Denied, Scope, decide
from helexa.acp.tools.tool_and_effects import Act, Calls, Fetches, Reads, Runs, Writes


@dataclass
class Remembered:
    """The user's answers, by tool and subject."""

    answers: dict[tuple[str, str], bool] = field(default_factory=dict)

    def ruling(self, scope: Scope) -> bool | None:
        return self.answers.get((scope.tool, scope.subject))

    def remember(self, scope: Scope, *, allowed: bool) -> None:
        self.answers[scope.tool, scope.subject] = allowed

    def always(self, act: Act, offer: int = 0, *, allowed: bool = True) -> list[tuple[str, bool]]:
        """Save an "always" answer for an act. Return the labels of all offers, and whether each is saved."""
        ruling = decide(act, "default", self.ruling)
        assert isinstance(ruling, AskUser)
        self.remember(ruling.offers[offer].scope, allowed=allowed)
        return [(offer.scope.label, offer.saved) for offer in ruling.offers]


def write(path: str, *, plans: bool = False) -> Writes:
    file = Path(path)
    return Writes(ResolvedPath(file, file, plans=plans, guarded=".git" in file.parts, folder=_HOME))


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
def test_permission_mode_decides_whether_an_action_is_allowed_asked_or_denied(
    act: Act, default: type, edits: type, plan: type, bypass: type
) -> None:
    rulings = [
        type(decide(act, mode, Remembered().ruling)) for mode in ("default", "acceptEdits", "plan", "bypassPermissions")
    ]
    assert rulings == [default, edits, plan, bypass]


def test_answer_always_allow_for_an_edit_covers_the_file_or_its_folder_as_chosen() -> None:
    remembered = Remembered()
    offers = [("edits of a.py", False), ("edits in src/", False), ("edits in src/", True)]
    assert remembered.always(_WRITE) == offers
    assert isinstance(decide(_WRITE, "default", remembered.ruling), Allowed)
    assert isinstance(decide(write("/home/ada/src/b.py"), "default", remembered.ruling), AskUser)
    remembered.always(write("/home/ada/src/b.py"), offer=1)
    assert isinstance(decide(write("/home/ada/src/b/c.py"), "default", remembered.ruling), Allowed)
    assert isinstance(decide(write("/home/ada/b.py"), "default", remembered.ruling), AskUser)
    assert isinstance(decide(write("/home/ada/src2/b.py"), "default", remembered.ruling), AskUser)
    assert isinstance(decide(write("/home/ada/src/.git/config"), "default", remembered.ruling), AskUser)
    assert isinstance(decide(_WRITE, "plan", remembered.ruling), Denied)


def test_answer_always_allow_for_edits_in_the_whole_project_is_not_saved() -> None:
    assert Remembered().always(write("/home/ada/a.py")) == [("edits of a.py", False), ("edits in ada/", False)]
    assert Remembered().always(_HOOK) == [("edits of pre-commit", False)]


def test_answer_always_reject_holds_even_in_bypass_mode() -> None:
    remembered = Remembered()
    remembered.always(Runs("git push origin", _HOME), allowed=False)
    for mode in ("default", "bypassPermissions"):
        assert isinstance(decide(Runs("git push origin", _HOME), mode, remembered.ruling), Denied)
    assert isinstance(decide(Runs("git add .", _HOME), "default", remembered.ruling), AskUser)


def test_always_allow_for_a_vetted_command_covers_its_line_or_all_its_read_only_options() -> None:
    remembered = Remembered()
    line = Runs("git diff --stat", _HOME, "git diff")
    offers = [("exactly `git diff --stat`", False), *(("`git diff` that only reads", saved) for saved in (False, True))]
    assert remembered.always(line) == offers
    assert isinstance(decide(line, "default", remembered.ruling), Allowed)
    assert isinstance(decide(Runs("git diff a.txt", _HOME, "git diff"), "default", remembered.ruling), AskUser)
    remembered.always(Runs("git diff a.txt", _HOME, "git diff"), offer=1)
    assert isinstance(decide(Runs("git diff a.txt", _HOME / "src", "git diff"), "default", remembered.ruling), Allowed)
    assert isinstance(decide(Runs("git diff --output=x", _HOME), "default", remembered.ruling), AskUser)
    assert isinstance(decide(Runs("git log", _HOME, "git log"), "default", remembered.ruling), AskUser)


def test_always_allow_for_an_unvetted_command_line_covers_only_this_line_and_session() -> None:
    remembered = Remembered()
    assert remembered.always(Runs("make test", _HOME)) == [("exactly `make test`", False)]
    assert isinstance(decide(Runs("make test", _HOME), "default", remembered.ruling), Allowed)
    assert isinstance(decide(Runs("make test x", _HOME), "default", remembered.ruling), AskUser)
    assert isinstance(decide(Runs("make test", _HOME / "src"), "default", remembered.ruling), AskUser)
    assert isinstance(decide(Runs("make test\u00a0", _HOME), "default", remembered.ruling), AskUser)
    remembered.always(Runs("x=make clean", _HOME))
    assert isinstance(decide(Runs("make clean", Path(f"{_HOME}=x")), "default", remembered.ruling), AskUser)


def test_permission_for_a_web_host_or_mcp_tool_covers_no_other_host_or_tool() -> None:
    remembered = Remembered()
    remembered.always(Fetches("example.com"))
    remembered.always(Calls("mcp__a__b", only_reads=False))
    assert isinstance(decide(Fetches("example.com"), "default", remembered.ruling), Allowed)
    assert isinstance(decide(Fetches("example.com.evil.org"), "default", remembered.ruling), AskUser)
    assert isinstance(decide(Calls("mcp__a__c", only_reads=False), "default", remembered.ruling), AskUser)
    assert isinstance(decide(Calls("mcp__a__b", only_reads=False), "plan", remembered.ruling), Denied)
