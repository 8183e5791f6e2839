#!/bin/sh
# Warm start on the format of a call, then reinforcement learning on the game, then a comparison.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-outputs/text-2048}
if [ -z "${BUCKEYE_API_KEY:-}" ]; then
  BUCKEYE_API_KEY=$(python -c "import secrets; print(secrets.token_urlsafe(24))")
  export BUCKEYE_API_KEY
fi
args="{\"dataset\": \"$out/tasks.json\", \"config_path\": \"$here/2048.yaml\"}"

python "$here/prepare.py" "$out"
buckeye model tiny "$out/base" --corpus "$out/corpus.txt" --vocab-size 512 --layers 3 --hidden 192 --max-length 512
buckeye sft @ "$here/sft.toml" --model.name "$out/base" --data.path "$out/chats.jsonl" --output-dir "$out/sft"

# every rollout gets a separate server from the gateway; `--image text-2048:latest` runs the image instead
buckeye gateway --command text-2048 --sessions 256 >"$out/gateway.log" 2>&1 &
gateway=$!
trap 'kill $gateway' EXIT
until python -c "import urllib.request as web; web.urlopen('http://localhost:8765/health')" 2>"$out/health.log"; do
  kill -0 $gateway # fails if the gateway has ended; see its log
  sleep 0.2
done

evaluate() {
  buckeye eval mcp --args "$args" --model "$1" --max-tokens 20 --max-concurrent 64 --output-dir "$out/$2"
}
evaluate "$out/sft/weights/step_80" before
rl --trainer @ "$here/train.toml" --orchestrator @ "$here/orch.toml" --inference @ "$here/infer.toml" \
  --model.name "$out/sft/weights/step_80" --output-dir "$out/rl" --orchestrator.env.0.args "$args"
evaluate "$out/rl/weights/step_60" after
python "$here/report.py" "$out" before after
