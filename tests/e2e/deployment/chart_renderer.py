"""Renders and checks the Helm chart. A test runs this script in an environment with Helm's library and the API schemas.

Usage: chart_renderer.py CHART < values.json. Prints the rendered manifests as a JSON list. Exit code 1: an error.
"""

import json
import sys

import kubernetes_validate
import yaml
from helm_python import HelmError
from helm_python.chart import Chart, lint

CUSTOM = {"ServiceMonitor"}  # kinds that Kubernetes itself does not define
WARNING = 2  # Helm's severity


def main(chart: str) -> None:
    """Render the chart with the values on stdin."""
    values = json.load(sys.stdin)
    findings = lint(chart, values)
    if faults := [message for message in findings["messages"] if message["severity"] >= WARNING]:
        sys.exit(json.dumps(faults))
    try:
        rendered = Chart.load(chart).render(values, name="llm", namespace="ai")
    except HelmError as error:
        sys.exit(str(error))
    texts = [text for path, text in rendered.items() if path.endswith(".yaml")]
    manifests = [document for text in texts for document in yaml.safe_load_all(text) if document]
    for manifest in manifests:
        if manifest["kind"] not in CUSTOM:
            kubernetes_validate.validate(manifest, "1.30", strict=True)
    json.dump(manifests, sys.stdout)


main(sys.argv[1])
