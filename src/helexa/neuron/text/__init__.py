"""Convert messages to tokens and tokens to text: chat templates, tokenizers."""

TEXT_PROCESS = "helexa.neuron.text.text_process"
# Modules that run as sandbox processes: one tokenizes, the other renders chat templates.
TEMPLATE_PROCESS = "helexa.neuron.text.template_process"
