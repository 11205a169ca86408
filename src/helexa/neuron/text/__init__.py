"""Convert messages to tokens and tokens to text: chat templates, tokenizers."""

# Modules that run as sandbox processes: one tokenizes, the other renders chat templates.
TOKENIZER_PROCESS = "helexa.neuron.text.tokenizer_process"
TEMPLATE_PROCESS = "helexa.neuron.text.template_sandbox_process"
