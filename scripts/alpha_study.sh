#!/usr/bin/env bash
# Does set-conditioned diversity (alpha) beat top-k on the same score? Two budgets x two reasoners: lambda is
# chosen on dev problems, the plan is sealed, and only then are held-out problems run.
#   scripts/alpha_study.sh dev MODEL BUDGET | choose | seal | confirm MODEL BUDGET | decide      (RUNS=runs/alpha)
set -euo pipefail
RUNS=${RUNS:-runs/alpha}
MODELS=${MODELS:-"trace-1 trace-2"}
BUDGETS=${BUDGETS:-"90 45"}
LAMBDAS="0 0.1 0.25 0.5 1"
PLAN=${PLAN:-docs/results/alpha-study.yaml}
mkdir -p "$RUNS"

evaluate() {  # model budget lambda folder and more flags
    local model=$1 budget=$2 lam=$3 out=$4
    shift 4
    kvkeep eval --task trace --model "$model" --policy set-diversity --option lam="$lam" --budget "$budget" \
        --buffer 16 --calibration "$RUNS/$model.safetensors" --batch-size 200 --threads 1 --out "$out" \
        "$@" $([ -e "$out/run.jsonl" ] && echo --resume)
}

case $1 in
dev)
    [ -e "$RUNS/$2.safetensors" ] || kvkeep calibrate --model "$2" --text "$RUNS/calibration.txt" \
        --out "$RUNS/$2.safetensors"
    for lam in $LAMBDAS; do
        evaluate "$2" "$3" "$lam" "$RUNS/dev-$2-$3-$lam" --limit 100 --draws 2
    done
    ;;
choose)  # the lambda with the best mean dev score over the four cells
    python - "$RUNS" <<'PY'
import statistics, sys
from pathlib import Path
from kvkeep.evaluation.runlog import read_run
from kvkeep.evaluation.statistics.problem_means import problem_means
scores = {}
for folder in sorted(Path(sys.argv[1]).glob("dev-*")):
    model, budget, lam = folder.name[4:].rsplit("-", 2)
    run = read_run(folder)
    score = float(problem_means(run.samples, "score").means.mean())
    scores.setdefault(lam, {})[f"{model} {budget}"] = score
    print(f"{model:8} budget {budget:>3} lambda {lam:>4}: {100 * score:5.1f} % at {run.mean_cache:.1f} entries")
mean = {lam: statistics.mean(cells.values()) for lam, cells in scores.items()}
print("mean over cells:", {lam: round(100 * value, 2) for lam, value in mean.items()})
best = max((lam for lam in mean if lam != "0"), key=mean.__getitem__)
Path(sys.argv[1], "lambda").write_text(best)
print("chosen:", best)
PY
    ;;
seal)
    lam=$(cat "$RUNS/lambda")
    cells=()
    for model in $MODELS; do
        for budget in $BUDGETS; do
            cells+=("$RUNS/dev-$model-$budget-0" "$RUNS/dev-$model-$budget-$lam")
        done
    done
    kvkeep study draft "${cells[@]}" --out "$PLAN" --limit 200 --correction bonferroni \
        --question "Does a penalty for likeness to what is already kept help the same score at equal memory?" \
        --hypothesis "set-diversity at lambda $lam answers more reads of TRACE than its own score's top-k (lambda 0)"
    kvkeep study freeze "$PLAN"
    ;;
confirm)
    for lam in 0 "$(cat "$RUNS/lambda")"; do
        evaluate "$2" "$3" "$lam" "$RUNS/confirm-$2-$3-$lam" --split confirm --prereg "$PLAN" --limit 200 --draws 2
    done
    ;;
decide)
    kvkeep compare "$RUNS"/confirm-* --confirm --prereg "$PLAN"
    ;;
esac
