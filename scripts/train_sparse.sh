#!/bin/sh
# Sparse training from a config, or evaluation of what it has trained:
#
#     sh train_sparse.sh [CONFIG] [NPROC] [-e] [options of `gossamer train`, as --data tiny]
#
# Without arguments, what stands here is used; edit it. To resume a run, or to evaluate a certain model, set
# `resume_model` under `saver` in the config.

CONFIG=configs/cls/resnet/res18_amba_sparse.yaml # from the root of the repository
NPROC=1                                          # processes, one for each GPU
EVALUATE=                                        # -e evaluates and does not train

set -eu

fail() {
    echo "train_sparse.sh: $1" >&2
    exit 2
}

root=$(cd "$(dirname "$0")/.." && pwd)

given=0
while [ $# -gt 0 ]; do
    case $1 in
        -e) EVALUATE=-e ;;
        -h | --help)
            sed -n '2,7s/^#//p' "$0"
            exit 0
            ;;
        -*) break ;; # this and all behind it are for gossamer
        *)
            given=$((given + 1))
            case $given in
                1) CONFIG=$1 ;;
                2) NPROC=$1 ;;
                *) fail "expected [CONFIG] [NPROC] [-e], found also '$1'" ;;
            esac
            ;;
    esac
    shift
done

case $NPROC in
    '' | *[!0-9]* | 0) fail "expected a number of processes, found '$NPROC'" ;;
esac

# A path may start here, at the root of the file system or at that of the repository, also with a slash before it.
case $CONFIG in
    /*) here=$CONFIG ;;
    *) here=$PWD/$CONFIG ;;
esac
for path in "$here" "$root/${CONFIG#/}"; do
    if [ -f "$path" ]; then
        found=$path
        break
    fi
done
[ -n "${found-}" ] || fail "no config '$CONFIG', neither in $PWD nor in $root"

if [ -z "${GOSSAMER-}" ]; then
    GOSSAMER=gossamer
    if [ -x "$root/.venv/bin/gossamer" ]; then GOSSAMER=$root/.venv/bin/gossamer; fi
fi
command -v "$GOSSAMER" > /dev/null || fail "there is no program '$GOSSAMER'; run 'make' in $root, or pip install gossamer"

cd "$root" # where a config's data/ and runs/ are
exec "$GOSSAMER" train "$found" --nproc "$NPROC" ${EVALUATE:+"$EVALUATE"} "$@"
