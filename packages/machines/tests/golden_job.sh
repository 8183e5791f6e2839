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
srun_options=(--wait=60 --kill-on-bad-exit=1 --cpus-per-task=64)
run_file=run.json
stop_seconds=270

# Every task runs this file again, and finds here which node it is.
if [ -n "${BUCKEYE_TASK:-}" ]; then
  if [ -e "$files/keys" ]; then set -a; . "$files/keys"; set +a; fi
  if [ "$SLURM_NODEID" != 0 ]; then
    exec "$python" -m buckeye node --head "$BUCKEYE_HEAD" --key-file "$output/cluster.key" \
      --number "$SLURM_NODEID" --name "$SLURMD_NODENAME"
  fi
  words=(rl "${settings[@]}")
  if [ "$SLURM_NNODES" -gt 1 ]; then
    words+=(--cluster.nodes "$SLURM_NNODES")
    words+=(--cluster.address "${BUCKEYE_HEAD%:*}" --cluster.port "${BUCKEYE_HEAD##*:}")
  fi
  if [ -e "$output/$run_file" ]; then words+=(--resume); fi
  exec "$python" -m buckeye "${words[@]}"
fi

echo "== job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, start $((${SLURM_RESTART_COUNT:-0} + 1)), $(date)"
export BUCKEYE_TASK=1
if [ "$SLURM_NNODES" -gt 1 ]; then
  # The address of this node is the one that reaches another: names often lead to the loopback.
  other=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 2p)
  place=$(scontrol show node "$other" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
  address=$("$python" -m buckeye.cluster.address "${place:-$other}") || exit 1
  export BUCKEYE_HEAD="$address:$((20000 + SLURM_JOB_ID % 10000))"
fi

# The time is nearly over: the run checkpoints and ends, and the job goes into the queue again.
requeue=
nearly_over() {
  requeue=1
  "$python" -m buckeye rl stop "$output" --timeout "$stop_seconds" &
}
trap nearly_over USR1

srun "${srun_options[@]}" bash "$files/job.sh" &
step=$!
while :; do
  wait "$step"
  code=$?
  if ! kill -0 "$step" 2>/dev/null; then break; fi  # else it was the signal that ended the wait
done
if [ -n "$requeue" ] && [ "$code" != 0 ]; then
  exec scontrol requeue "$SLURM_JOB_ID"
fi
rm -f "$files/keys"
exit "$code"
