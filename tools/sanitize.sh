#!/usr/bin/env bash
# compute-sanitizer over the CUDA kernels, in parts that each end inside of ten minutes.
#
#   tools/sanitize.sh                                   all parts
#   tools/sanitize.sh memcheck-kernels racecheck-plain  some of them
#   tools/sanitize.sh list                              their names
#   JOBS=6 tools/sanitize.sh                            six at a time
#
# A part is a tool and a suite, and of long ones a piece: racecheck-plain.2; racecheck-plain stands for all its pieces.
# Tools: memcheck, initcheck, racecheck, synccheck. Suites:
#   kernels, select      tests/kernels/kernel_checks.cu, which is compiled here unless KERNEL_CHECKS names it; no torch
#   edges, options, plain, logits, count, sampling, properties    the cuda tests of pytest whose shapes are small
#   fuzz                                                 tools/fuzz.py
#
# Of torch the caching allocator is switched off: it would hand out parts of large blocks, in which a kernel that runs
# over the end of one tensor meets another. CUDA graphs need that allocator, so tests with graphs are left out.
#
# Findings are told from those of other libraries by the kernel: ours are in the namespace syncfree. All kernels are
# watched, torch's and cuBLAS' too, or what they write would count as never written; a report that names no kernel of
# ours is counted in the column "other" and fails nothing. Errors of API calls are not reported: torch probes.
#
# initcheck may not see what bulk tensor stores (TMA) write. Whether it does is tried first, with a kernel that reads
# what only such a store has written (kernel_checks stores). If that is reported, reports of the kernels that read what
# products have stored go into the column "stored" and fail nothing; see docs/reliability.md.
#
# Environment: PYTHON, JOBS (1), SECONDS_EACH (570), OUT (build/sanitize-cuda): logs, and summary.json. It runs from a
# checkout with the library built in place, or with another syncfree_ext on PYTHONPATH. The status is 1 if a part found
# something, failed, or did not end in time.
set -uo pipefail
unset SYNCFREE_PIECE # it would leave out tests of the parts without pieces
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-build/sanitize-cuda}
limit=${SECONDS_EACH:-570}
PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
tools="memcheck initcheck racecheck synccheck"
suites="kernels select edges options plain logits count sampling properties fuzz"

pieces_of() { # tool-suite: so many that each ends in time on an H200 that others use too
  case $1 in
    racecheck-options) echo 6 ;;
    racecheck-edges | racecheck-plain) echo 5 ;;
    racecheck-logits | *-edges | *-options | *-plain) echo 3 ;;
    racecheck-sampling | *-logits) echo 2 ;;
    *) echo 1 ;;
  esac
}

known=()
for tool in $tools; do
  for suite in $suites; do
    pieces=$(pieces_of "$tool-$suite")
    if ((pieces == 1)); then known+=("$tool-$suite"); else for k in $(seq "$pieces"); do known+=("$tool-$suite.$k"); done; fi
  done
done
parts=()
for name in "${@:-all}"; do
  found=
  for part in "${known[@]}"; do
    [[ $name =~ ^(all|list)$ || $name == "$part" || $name == "${part%.*}" ]] && parts+=("$part") && found=1
  done
  if [[ -z $found ]]; then
    echo "sanitize.sh: a part is one of ${tools// /, } and, after a hyphen, one of ${suites// /, }, of which some are in" \
      "pieces (sanitize.sh list); got $name" >&2
    exit 2
  fi
done
if [[ ${1:-} == list ]]; then
  printf '%s\n' "${parts[@]}"
  exit
fi
command -v compute-sanitizer >/dev/null || { echo "sanitize.sh: compute-sanitizer is not on PATH; set CUDA_HOME" >&2; exit 2; }
mkdir -p "$out"
out=$(realpath "$out")
[[ -n $(compgen -G 'syncfree_ext/_C.*') ]] && export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

# The launchers' checks, for the GPU that is here, with line numbers.
checks=${KERNEL_CHECKS:-$out/kernel_checks}
needed=
[[ " ${parts[*]} " =~ -(kernels|select)\  ]] && needed=1
[[ " ${parts[*]} " == *" initcheck-"* ]] && command -v nvcc >/dev/null && needed=1 # else there is no probe
if [[ -n $needed && ! -x $checks ]]; then
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)
  echo "compiling kernel_checks for sm_${capability:-90}"
  mkdir -p "$out/objects"
  for source in tests/kernels/kernel_checks.cu csrc/cuda/kernels/{count,row_moves,row_loss,reduce,scale,publish,select}.cu; do
    echo "$source"
  done | xargs -P "$(nproc)" -I{} sh -c \
    "nvcc -std=c++20 -O3 -lineinfo -arch=sm_${capability:-90} -c {} -o $out/objects/\$(basename {} .cu).o" || exit 2
  nvcc -arch="sm_${capability:-90}" "$out"/objects/*.o -o "$checks" || exit 2
fi

run_part() { # name
  local part=${1%.*} tool suite from=$SECONDS examples=16 fuzzed=300 command environment=() status try
  tool=${part%%-*} suite=${part#*-}
  # What takes long under a tool is done less often.
  [[ $tool == racecheck ]] && examples=4 fuzzed=80
  [[ $tool == initcheck ]] && examples=10 fuzzed=200
  local pytest=("$python" -m pytest -q -p no:cacheprovider -p no:xdist --no-header --tb=short -k "cuda and not graph and not capture and not 2_31")
  # It takes longest with these, 52 tests of twenty calls: the two denser masks alone; test_first has all four.
  [[ $tool == racecheck ]] && pytest[-1]+=" and not (test_scores_replace_the_keys and (0.0 or 0.02))"
  case $suite in
    kernels) command=("$checks" count rows moves scale publish) ;;
    select) command=("$checks" select) ;;
    edges) command=("${pytest[@]}" tests/test_edges.py) ;;
    options) command=("${pytest[@]}" tests/test_edges_options.py) ;;
    plain) command=("${pytest[@]}" tests/test_edges_plain.py) ;;
    logits) command=("${pytest[@]}" tests/test_cross_entropy.py tests/test_shard_ops.py) ;;
    count) command=("${pytest[@]}" tests/test_count_scale.py tests/test_publish.py) ;;
    sampling) command=("${pytest[@]}" tests/test_sampling.py) ;;
    properties) command=("${pytest[@]}" tests/test_properties.py) ;;
    fuzz) command=("$python" tools/fuzz.py --device cuda --minutes 8 --cases $fuzzed --seed "${SYNCFREE_SEED:-1}") ;;
  esac
  environment=(PYTORCH_NO_CUDA_MEMORY_CACHING=1 SYNCFREE_FAIL_WITHOUT_CUDA=1 SYNCFREE_EXAMPLES=$examples SYNCFREE_SHRINK=0)
  [[ $1 == *.* ]] && environment+=("SYNCFREE_PIECE=${1##*.}/$(pieces_of "$part")")
  for try in 1 2; do
    timeout -k 10 "$limit" env "${environment[@]}" compute-sanitizer --tool "$tool" --target-processes all \
      --report-api-errors no --show-backtrace no --print-limit 0 "${command[@]}" >"$out/$1.log" 2>&1
    status=$?
    # The tool itself may crash before it starts the program, where many begin at once: its banner is all there is then.
    [[ $status == 139 && $(wc -l <"$out/$1.log") -le 1 ]] || break
  done
  echo "$status $((SECONDS - from))" >"$out/$1.status"
}

rm -f "$out/stores.log"
if [[ " ${parts[*]} " == *" initcheck-"* && -x $checks ]]; then
  timeout -k 10 120 compute-sanitizer --tool initcheck --show-backtrace no "$checks" stores >"$out/stores.log" 2>&1
fi
running=0
for part in "${parts[@]}"; do
  rm -f "$out/$part.status"
  run_part "$part" &
  if ((++running >= ${JOBS:-1})); then
    wait -n
    ((running--))
  fi
done
wait
"$python" tools/sanitize_summary.py "$out" "${parts[@]}"
