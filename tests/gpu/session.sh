#!/usr/bin/env bash
# Runs several steps on a machine with GPUs within a bounded time and leaves few files:
#   session.log   everything that was printed
#   results.json  the results of all steps
#   debug.tar.gz  NCCL's own logs of the info step
#
#   tests/gpu/session.sh [STEP...]        steps: env build info smoke faults ddp kill hang
#                                                bench perf   (default: env)
# A step may carry a suffix of its own settings: `STEP:KEY=VALUE:KEY=VALUE`, where KEY is a
# variable of the step's line below (NICS, PROTOS, OPS, SCEN, REPS, CYCLES, SIZE, VARIANTS, STEPS,
# WATCH; ENV=K=V passes a variable to the job).
#
# Environment: OUT (where to write; default build/gpu), NCCL_TESTS, NCCL_LIB, FASTSOCKET, PYTHON
# (an interpreter with PyTorch and pyroute2), LIMIT (seconds for all steps, default 570).
# Exit code: the number of steps that failed.
# shellcheck disable=SC2329  # the steps are called by name
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1

OUT=${OUT:-build/gpu}
PYTHON=${PYTHON:-python3}
LIMIT=${LIMIT:-570}
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
mkdir -p "$OUT"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

say() { printf '[%4ds] %s\n' "$SECONDS" "$*" | tee -a "$OUT/session.log"; }

# bounded SECONDS CMD...: runs within its own limit and what is left of the whole.
bounded() {
    local limit=$1 left=$((LIMIT - SECONDS))
    shift
    ((left < limit)) && limit=$left
    timeout --kill-after=15 "$limit" "$@" 2>&1 | tee -a "$OUT/session.log"
    return "${PIPESTATUS[0]}"
}

nccl_tests() { bounded "$1" "$PYTHON" tests/gpu/run_nccl_tests.py "${@:2}" --json "$work/$json"; }
ddp() { bounded "$1" "$PYTHON" tests/gpu/run_ddp.py "${@:2}" --json "$work/$json"; }

step_env() {
    bounded 60 bash -c 'nvidia-smi -L; nproc; free -g | head -2; uname -r; gcc --version | head -1
        '"$PYTHON"' -c "import sys, torch; print(sys.version.split()[0], torch.__version__,
            torch.cuda.nccl.version(), torch.cuda.device_count())"
        '"$PYTHON"' -c "import pyroute2, cffi, click; print(\"pyroute2\", pyroute2.__version__)"
        ls -l /dev/shm | head -3; ulimit -n -l; cat /proc/sys/net/ipv4/tcp_[rw]mem
        cat /proc/sys/net/ipv4/tcp_congestion_control'
}

step_build() { bounded 120 make -j "$(nproc)" artefacts build/bench/rawsock PYTHON="$PYTHON"; }

step_info() {
    nccl_tests 100 info --variants "${VARIANTS:-r2ccl,sockets,fastsocket}" --nics "${NICS:-2}" \
        --debug-log "$work/nccl" --timeout 30 "${extra[@]}"
}

step_smoke() {
    nccl_tests 150 bench --variants "${VARIANTS:-r2ccl}" --nics "${NICS:-2}" --reps 1 --iters 5 \
        --protos "${PROTOS:-auto}" --max "${SIZE:-64M}" --timeout 40 \
        --ops "${OPS:-all_reduce,all_gather,reduce_scatter,alltoall,sendrecv,broadcast}" \
        "${extra[@]}"
}

step_faults() {
    nccl_tests 300 faults --nics "${NICS:-2}" --ops "${OPS:-all_reduce}" --timeout 90 \
        --variants "${VARIANTS:-r2ccl}" --protos "${PROTOS:-LL,LL128,Simple}" \
        --scenarios "${SCEN:-tour}" --cycles "${CYCLES:-100}" --size "${SIZE:-32M}" "${extra[@]}"
}

step_ddp() {
    ddp 300 exact --nics "${NICS:-2}" --scenarios "${SCEN:-one,replay,silent,tour}" \
        --variants "${VARIANTS:-r2ccl}" --steps "${STEPS:-300}" --timeout 90 "${extra[@]}"
}

# One rank per node: a rank whose peers are all in its own node sees no network at all.
step_kill() {
    local nodes=(--nodes "$("$PYTHON" -c 'import sys; sys.path.insert(0, "tests/gpu")
import jobs; print(max(2, jobs.gpu_count()))')" --ranks-per-node 1)
    nccl_tests 60 kill "${nodes[@]}" --nics "${NICS:-2}" --variants "${VARIANTS:-r2ccl}" \
        --timeout 40 "${extra[@]}"
    local first=$?
    json=${json%.json}-ddp.json
    ddp 90 kill "${nodes[@]}" --nics "${NICS:-2}" --variants "${VARIANTS:-r2ccl}" --timeout 60 \
        --within 10 "${extra[@]}" && return "$first"
}

step_hang() {
    ddp 120 hang --nics "${NICS:-2}" --variants "${VARIANTS:-sockets}" --watch "${WATCH:-60}" \
        "${extra[@]}"
}

step_bench() {
    nccl_tests 500 bench --nics "${NICS:-2}" --ops "${OPS:-all_reduce}" --reps "${REPS:-5}" \
        --variants "${VARIANTS:-r2ccl,sockets-4x2,sockets-2x4,fastsocket,fastsocket-4x2}" \
        --protos "${PROTOS:-auto}" --timeout 45 "${extra[@]}"
}

step_perf() {
    nccl_tests 90 perf --nics "${NICS:-2}" --variants "${VARIANTS:-r2ccl}" --timeout 45 \
        --args "--op ${OPS:-all_reduce} -b 8 -e ${SIZE:-64M} -f 32 -n 10 -w 3 -c 1" "${extra[@]}"
}

# Whatever was written so far becomes results.json after every step: a limit may end us.
merge() {
    "$PYTHON" - "$work" "$OUT/results.json" <<'PY'
import json, pathlib, sys
results = {}
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
    try:
        results[path.stem] = json.loads(path.read_text())
    except ValueError as err:
        results[path.stem] = {"error": str(err)}
pathlib.Path(sys.argv[2]).write_text(json.dumps(results, indent=1) + "\n")
PY
    if compgen -G "$work/*.log" >/dev/null; then
        (cd "$work" && tar cz ./*.log) >"$OUT/debug.tar.gz"
    fi
}

one_step() {
    local name=${1%%:*} number=$2 rest pair
    local NICS='' PROTOS='' OPS='' SCEN='' REPS='' CYCLES='' SIZE='' VARIANTS='' STEPS='' WATCH=''
    local -a extra=()
    json="$number-$name.json"
    rest=${1#"$name"}
    while [[ $rest == :* ]]; do
        rest=${rest#:}
        pair=${rest%%:*}
        rest=${rest#"$pair"}
        case ${pair%%=*} in
        NICS | PROTOS | OPS | SCEN | REPS | CYCLES | SIZE | VARIANTS | STEPS | WATCH)
            printf -v "${pair%%=*}" '%s' "${pair#*=}" ;;
        ENV) extra+=(--env "${pair#*=}") ;;
        *) say "step $name: '$pair' is no setting"; return 2 ;;
        esac
    done
    "step_$name"
}

number=0
for step in "${@:-env}"; do
    number=$((number + 1))
    if ! declare -F "step_${step%%:*}" >/dev/null; then
        say "step '$step' does not exist"
        failed=$((failed + 1))
        continue
    fi
    if ((SECONDS > LIMIT - 15)); then
        say "step $step: left out, no time left"
        failed=$((failed + 1))
        continue
    fi
    say "=== step $step"
    begun=$SECONDS
    one_step "$step" "$(printf %02d $number)"
    rc=$?
    ((rc != 0)) && failed=$((failed + 1))
    merge
    say "=== step $step: exit code $rc after $((SECONDS - begun)) s"
done
say "$failed of $number steps failed"
exit "$failed"
