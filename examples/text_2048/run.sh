#!/bin/sh
# Warm start on the format of a call, then reinforcement learning on the game, then a comparison.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-outputs/text-2048}
env="--arg taskset=$out/tasks.json --arg config_path=$here/2048.yaml"
python "$here/prepare.py" "$out"
buckeye model tiny "$out/base" --corpus "$out/corpus.txt" --vocab-size 512 --layers 3 --hidden 192 --max-length 2048
sft @ "$here/sft.toml" --model.name "$out/base" --data.path "$out/chats.jsonl" --output-dir "$out/sft"
buckeye eval buckeye-vf-gym $env --model "$out/sft/weights/step_150" --max-tokens 20 --output-dir "$out/before"
rl --trainer @ "$here/train.toml" --orchestrator @ "$here/orch.toml" --inference @ "$here/infer.toml" \
  --model.name "$out/sft/weights/step_150" --output-dir "$out/rl" \
  --orchestrator.env.0.args "{\"taskset\": \"$out/tasks.json\", \"config_path\": \"$here/2048.yaml\"}"
buckeye eval buckeye-vf-gym $env --model "$out/rl/weights/step_40" --max-tokens 20 --output-dir "$out/after"
