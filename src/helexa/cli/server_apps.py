"""The commands of `neuron` and `cortex` as `helexa node` and `gateway`."""

from functools import partial

from cyclopts import App

from helexa.core.command_line import VERSION_FLAGS
from helexa.core.version import version_line
from helexa.cortex.cli import app as cortex
from helexa.neuron.cli import app as neuron
from helexa.neuron.cli import serve as serve_node

node = App(name="node", help=neuron.help, version=partial(version_line, "helexa"), version_flags=VERSION_FLAGS)
node.update(neuron)
node.default(serve_node)
gateway = App(name="gateway", help=cortex.help, version=partial(version_line, "helexa"), version_flags=VERSION_FLAGS)
gateway.update(cortex)
