"""Model sources: from an id such as `huggingface:org/name` to a file on this machine."""

from helexa.neuron.sources.fetch import Fetch, ProgressReport
from helexa.neuron.sources.sources import Sources

__all__ = ["Fetch", "ProgressReport", "Sources"]
