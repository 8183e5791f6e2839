#!/bin/bash
#SBATCH --job-name=buckeye-one
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --gres=gpu:h100:8
#SBATCH --partition=gpu
#SBATCH --account=lab
#SBATCH --time=04:00:00
#SBATCH --chdir=/work
#SBATCH --output="/srv/my runs/one/slurm/job.log"
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --constraint=ib

python=/opt/venv/bin/python
output='/srv/my runs/one'
files='/srv/my runs/one/slurm'
settings=(@ run.toml --max-steps 7)
nodes="$SLURM_NNODES"
inside=()
run_file=run.json
stop_seconds=270

echo "== job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, start $((${SLURM_RESTART_COUNT:-0} + 1)), $(date)"
if [ -e "$files/keys" ]; then set -a; . "$files/keys"; set +a; fi
words=(rl "${settings[@]}")
if [ "$nodes" -gt 1 ]; then words+=(--cluster.nodes "$nodes"); fi
if [ -e "$output/$run_file" ]; then words+=(--resume); fi

# The time is nearly over: the run checkpoints and ends, and the job goes into the queue again.
requeue=
nearly_over() {
  requeue=1
  "${inside[@]}" "$python" -m buckeye rl stop "$output" --timeout "$stop_seconds" &
}
trap nearly_over USR1

# The run is led from here; what it starts on the other nodes are steps of the job (srun --overlap).
if [ "$nodes" -gt 1 ]; then words+=(--cluster.engine srun); fi
"${inside[@]}" "$python" -m buckeye "${words[@]}" &
run=$!
while :; do
  wait "$run"
  code=$?
  if ! kill -0 "$run" 2>/dev/null; then break; fi  # else it was the signal that ended the wait
done
if [ -n "$requeue" ] && [ "$code" != 0 ]; then
  exec scontrol requeue "$SLURM_JOB_ID"
fi
rm -f "$files/keys"
exit "$code"
