"""Messages for misspelled commands and options, and for words of other programs."""

import difflib

from cyclopts import CycloptsError, UnknownCommandError, UnknownOptionError

_DOWNLOAD = "download models with `helexa pull`"
_REMOVE = "remove models with `helexa rm`"
_SERVE = "start a gateway and a node with `helexa up`"
_STOP = "`helexa stop` stops `helexa up`"
_DESCRIBE = "describe a model with `helexa show`"
_ASK = "get an answer with `helexa generate`"
_NO_ACCOUNT = "helexa has no accounts; for gated models of the Hugging Face Hub, set HF_TOKEN"
_FIND = "`helexa list` has the models on this machine, `helexa models` has models to download"
_KEYS = "create API keys with `helexa gateway keys`"

OTHER_WORDS = {
    "start": _SERVE,
    "server": _SERVE,
    "launch": _SERVE,
    "restart": f"{_STOP}; then run the command again",
    "kill": _STOP,
    "down": _STOP,
    "exit": _STOP,
    "get": _DOWNLOAD,
    "fetch": _DOWNLOAD,
    "download": _DOWNLOAD,
    "install": _DOWNLOAD,
    "update": "`helexa pull MODEL` updates a model; update helexa with the program that installed it, such as pip",
    "upgrade": "update helexa with the program that installed it, such as pip; `helexa pull MODEL` updates a model",
    "delete": _REMOVE,
    "del": _REMOVE,
    "remove": _REMOVE,
    "uninstall": _REMOVE,
    "search": _FIND,
    "library": _FIND,
    "info": _DESCRIBE,
    "inspect": _DESCRIBE,
    "describe": _DESCRIBE,
    "ask": _ASK,
    "prompt": _ASK,
    "complete": _ASK,
    "completions": _ASK,
    "batch": "answer a file of prompts with `helexa generate --prompts FILE`",
    "run-batch": "answer a file of prompts with `helexa generate --prompts FILE`",
    "repl": "chat with `helexa chat`",
    "create": "helexa needs no Modelfile: `helexa run ./model.gguf` runs a file, and --system sets a system prompt",
    "cp": "helexa does not copy models; `helexa up MODEL --served-model-name NAME` gives a model another name",
    "push": "helexa does not upload models",
    "login": _NO_ACCOUNT,
    "logout": _NO_ACCOUNT,
    "signin": _NO_ACCOUNT,
    "signout": _NO_ACCOUNT,
    "auth": _KEYS,
    "keys": _KEYS,
    "key": _KEYS,
    "top": "show the load of each model with `helexa ps`, and the newest requests with `helexa gateway top`",
    "embed": "helexa embeds text with the API: POST /v1/embeddings",
    "tokenize": "helexa counts tokens with the API: POST /tokenize",
    "convert": "helexa reads GGUF and safetensors files as they are; `--quant` quantizes a model while it loads",
    "quantize": "helexa reads GGUF and safetensors files as they are; `--quant` quantizes a model while it loads",
    "validate": "test this machine with `helexa doctor` or `helexa node validate`",
    "check": "check this machine with `helexa doctor`, and a gateway's files with `helexa gateway check`",
    "ui": "`helexa up` has a console: open the printed address in a browser",
    "web": "`helexa up` has a console: open the printed address in a browser",
    "dashboard": "`helexa up` has a console: open the printed address in a browser",
}
"""Commands of other programs, and what to do with helexa instead."""

_TARGET = "`helexa up` has this option, and `helexa run` then uses the model of `helexa up`"
_NOT_NEEDED = "helexa does not need this option; leave the option out"

OTHER_OPTIONS = {
    "-hf": "write the model as an argument, as in `helexa run org/name:Q4_K_M`",
    "--hf-repo": "write the model as an argument, as in `helexa run org/name:Q4_K_M`",
    "-hff": "write the quantization after the model, as in `org/name:Q4_K_M`",
    "--hf-file": "write the quantization after the model, as in `org/name:Q4_K_M`",
    "-mu": "download the file, and give its path as the model",
    "--model-url": "download the file, and give its path as the model",
    "-ngl": "--device cpu or --device cuda selects the device of all layers",
    "--n-gpu-layers": "--device cpu or --device cuda selects the device of all layers",
    "--gpu-layers": "--device cpu or --device cuda selects the device of all layers",
    "-t": f"set NEURON_HARNESS__TORCH__THREADS; {_TARGET}",
    "--threads": f"set NEURON_HARNESS__TORCH__THREADS; {_TARGET}",
    "-fa": _NOT_NEEDED,
    "--flash-attn": _NOT_NEEDED,
    "--gpu-memory-utilization": "set NEURON_HARNESS__TORCH__MEMORY_LIMIT_MB to limit the memory of models",
    "--served-model-name": "`helexa up` and `helexa node` have the option",
    "--chat-template": _TARGET,
    "--chat-template-file": _TARGET,
    "--jinja": _NOT_NEEDED,
    "--enable-prefix-caching": _NOT_NEEDED,
    "--enable-chunked-prefill": _NOT_NEEDED,
    "--trust-remote-code": "helexa runs no code of a model's repository; leave the option out",
    "--mlock": _NOT_NEEDED,
    "--no-mmap": _NOT_NEEDED,
    "--cont-batching": _NOT_NEEDED,
    "-cb": _NOT_NEEDED,
    "--download-dir": "set HF_HUB_CACHE and HELEXA_CACHE to the folder of the downloads",
    "--hf-token": "set the environment variable HF_TOKEN",
    "-b": "--max-num-batched-tokens limits the tokens of an engine step",
    "--batch-size": "--max-num-batched-tokens limits the tokens of an engine step",
    "-ub": "--max-num-batched-tokens limits the tokens of an engine step",
    "--ubatch-size": "--max-num-batched-tokens limits the tokens of an engine step",
    "-ctk": "--kv-cache-dtype sets the type of keys and values",
    "--cache-type-k": "--kv-cache-dtype sets the type of keys and values",
    "-ctv": "--kv-cache-dtype sets the type of keys and values",
    "--cache-type-v": "--kv-cache-dtype sets the type of keys and values",
    "--temp": "write --temperature",
    "--n-predict": "--max-tokens limits the tokens of an answer",
    "--num-predict": "--max-tokens limits the tokens of an answer",
    "--repeat-penalty": "write --repetition-penalty",
    "--format": "--schema constrains answers to JSON",
    "-sys": "-s or --system sets the system prompt",
    "--system-prompt": "-s or --system sets the system prompt",
    "-p": "write the prompt as an argument, after the model",
    "--prompt": "write the prompt as an argument, after the model",
    "--pipeline-parallel-size": "host groups need the configuration in docs/parallel.md",
    "-pp": "host groups need the configuration in docs/parallel.md",
    "--data-parallel-size": "start a node on each machine, and let a gateway route to them",
    "--embeddings": "every model answers POST /v1/embeddings; leave the option out",
    "--embedding": "every model answers POST /v1/embeddings; leave the option out",
    "--task": _NOT_NEEDED,
    "--keepalive": "`helexa up` keeps models loaded until another model needs the memory",
    "--nowordwrap": _NOT_NEEDED,
}
"""Options of Ollama, vLLM and llama.cpp, and what to do instead."""

_NEAR = 0.8  # minimum similarity of a suggested command; with a lower value, `node` would be suggested for `unload`


def usage_message(error: CycloptsError) -> str:
    """Return the message for invalid arguments, with advice where possible."""
    if isinstance(error, UnknownOptionError):
        option = (error.token.keyword or error.token.value).partition("=")[0]
        advice = OTHER_OPTIONS.get(option)
        return str(error) if advice is None else f"unknown option {option}; {advice}."
    if not isinstance(error, UnknownCommandError) or not error.unused_tokens or error.app is None:
        return str(error)
    word = error.unused_tokens[0]
    names = [name for name in error.app if not name.startswith("-")]
    unknown = f'unknown command "{word}"'
    if "helexa" in error.app.name and (advice := OTHER_WORDS.get(word.lower())):
        return f"{unknown}; {advice}."
    if near := difflib.get_close_matches(word, names, n=1, cutoff=_NEAR):
        return f'{unknown}; did you mean "{near[0]}"?'
    return f"{unknown}; the commands are {', '.join(names)}."
