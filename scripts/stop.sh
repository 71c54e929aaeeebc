#!/bin/sh
# End the runs of this folder, each at its next safe point (a checkpoint is written); wait until they have.
#
#     sh scripts/stop.sh              # every run under runs/
#     sh scripts/stop.sh runs/name    # that one
#
# A run is going on when its .lock is held, whatever the file says. The signal goes to the process that the lock names,
# if that process has the lock open: nothing else is touched. LIMIT: seconds to wait, 600 unless set.
# Exit status: 0 all have ended (or none was running), 1 one has not.
limit=${LIMIT:-600}
where=${*:-runs/}
[ $# -gt 0 ] || set -- runs/*
command -v flock >/dev/null || { echo "error: flock is not here; it comes with util-linux" >&2; exit 1; }

waiting= failed=0
for run in "$@"; do
    lock=${run%/}/.lock
    [ -d "$run" ] || [ "$run" = "runs/*" ] || { echo "error: $run: no such run" >&2; failed=1; continue; }
    if [ ! -f "$lock" ] || flock -n "$lock" true; then continue; fi
    pid=$(head -n 1 "$lock")
    case $pid in
        '' | *[!0-9]*) echo "error: $lock is held, but names no process" >&2; failed=1; continue ;;
    esac
    if ! readlink "/proc/$pid/fd/"* 2>/dev/null | grep -Fqx "$(realpath "$lock")"; then
        echo "error: $lock is held, but not by process $pid of this machine; stop it where it runs" >&2
        failed=1
        continue
    fi
    kill -TERM "$pid" || { failed=1; continue; }
    echo "$run: process $pid was told to stop; waiting for its checkpoint"
    waiting="$waiting $lock"
done

[ -n "$waiting" ] || [ $failed = 1 ] || echo "nothing is running in $where"
for lock in $waiting; do
    if flock -w "$limit" "$lock" true; then
        echo "${lock%/.lock}: stopped; the same command goes on"
    else
        echo "error: ${lock%/.lock} has not ended after $limit s; kill -9 $(head -n 1 "$lock") ends it (the last checkpoint stands)" >&2
        failed=1
    fi
done
exit $failed
