# Quick start
buckeye rl init my-env:latest
buckeye hf tasks.json --name my-org/my-tasks
buckeye rl

# buckeye rl init
buckeye rl init hudpython/hud-text-2048:latest
buckeye rl init my-env:latest -o configs/my-env.yaml
buckeye rl init my-env:latest --force  # Overwrite existing

# buckeye hf
buckeye hf tasks.json --name my-org/my-dataset
buckeye hf tasks.json --name my-org/private-dataset --private
buckeye hf tasks.json --name local-dataset --no-push  # Local only

# buckeye rl
buckeye rl --model gpt-4o-mini --dataset my-org/my-tasks
buckeye rl --config configs/2048.yaml --gpus 4xH100
buckeye rl --gpus 4xH100 --provider prime
