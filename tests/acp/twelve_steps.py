"""A task of twelve steps: search, edit three files, run the tests, mend what broke."""

import sys
from pathlib import Path

from scripted_endpoint import Say

FILES = {
    "shop/price.py": 'def net(price):\n    """The price before tax."""\n    return price / 1.19\n',
    "shop/cart.py": (
        "from shop.price import net\n\n\ndef total(prices):\n    return sum(net(price) for price in prices)\n"
    ),
    "shop/report.py": "from shop.price import net\n\n\ndef line(price):\n    return f'{net(price):.2f}'\n",
    "check.py": (
        "from shop.cart import total\n"
        "from shop.report import line\n"
        "assert line(119) == '100.00', line(119)\n"
        "assert total([119, 238]) == 300, total([119, 238])\n"
        "print('all is well')\n"
    ),
    "AGENTS.md": "Run `check.py` to test.\n",
}

PROMPT = "Rename net to before_tax everywhere, and have it take the rate."


def make_project(folder: Path) -> None:
    """Write the project's files."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def script() -> list[Say]:
    """What the model says, one answer for each step."""
    check = f"PYTHONDONTWRITEBYTECODE=1 {sys.executable} check.py"

    def plan(*done: int) -> tuple[str, dict]:
        steps = ("rename", "test")
        status = ["completed" if index in done else "pending" for index in range(len(steps))]
        return "todo", {
            "tasks": [{"content": step, "status": state} for step, state in zip(steps, status, strict=True)]
        }

    def edit(name: str, old: str, new: str) -> tuple[str, dict]:
        return "edit_file", {"path": name, "old_text": old, "new_text": new}

    return [
        Say("I plan.", thought="First a plan.", calls=(plan(),)),
        Say(calls=(("list_dir", {"path": "."}), ("glob", {"pattern": "**/*.py"}))),
        Say("Where is it?", calls=(("grep", {"pattern": r"\bnet\b"}),)),
        Say(calls=tuple(("read_file", {"path": f"shop/{name}.py"}) for name in ("price", "cart", "report"))),
        Say(calls=(edit("shop/price.py", "def net(price):", "def before_tax(price, rate):"),)),
        Say(calls=(edit("shop/price.py", "price / 1.19", "price / rate"),)),
        Say(calls=(edit("shop/cart.py", "import net", "import before_tax"),)),
        Say(calls=(edit("shop/report.py", "net(price):.2f", "before_tax(price, 1.19):.2f"),)),
        Say("Does it work?", calls=(("bash", {"command": check}),)),
        Say(
            "Two places are left.",
            calls=(
                edit("shop/cart.py", "net(price)", "before_tax(price, 1.19)"),
                edit("shop/report.py", "import net", "import before_tax"),
            ),
        ),
        Say(calls=(("bash", {"command": check}), plan(0, 1))),
        Say("It is renamed, and the tests pass.", tokens=(2000, 12)),
    ]


AFTER = {
    "shop/price.py": FILES["shop/price.py"].replace("net(price)", "before_tax(price, rate)").replace("1.19", "rate"),
    "shop/cart.py": (
        "from shop.price import before_tax\n\n\n"
        "def total(prices):\n    return sum(before_tax(price, 1.19) for price in prices)\n"
    ),
    "shop/report.py": (
        "from shop.price import before_tax\n\n\ndef line(price):\n    return f'{before_tax(price, 1.19):.2f}'\n"
    ),
}
