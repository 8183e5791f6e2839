#!/bin/bash
# A run on two nodes of Slurm. It checkpoints before its time limit, and resumes when it is requeued.
#   sbatch examples/slurm/job.sh @ run.toml
#   buckeye rl status outputs/run        buckeye rl stop outputs/run
#SBATCH --job-name=buckeye
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive --mem=0
#SBATCH --gres=gpu:8
#SBATCH --time=04:00:00
#SBATCH --output=buckeye-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300

python=${PYTHON:-python}
output=${OUTPUT_DIR:-outputs/run}   # on a shared disk
stop_seconds=270

echo "== job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, start $((${SLURM_RESTART_COUNT:-0} + 1)), $(date)"
words=(rl "$@" --output-dir "$output")
if [ "$SLURM_NNODES" -gt 1 ]; then words+=(--cluster.nodes "$SLURM_NNODES" --cluster.engine srun); fi
if [ -e "$output/run.json" ]; then words+=(--resume); fi

# Before the time limit, the run checkpoints and ends, and the job is requeued.
requeue=
nearly_over() {
  requeue=1
  "$python" -m buckeye rl stop "$output" --timeout "$stop_seconds" &
}
trap nearly_over USR1

# The first node leads the run. Its processes on other nodes are steps of the job (srun --overlap).
"$python" -m buckeye "${words[@]}" &
run=$!
while :; do
  wait "$run"
  code=$?
  if ! kill -0 "$run" 2>/dev/null; then break; fi  # else the signal ended the wait
done
if [ -n "$requeue" ] && [ "$code" != 0 ]; then
  exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
