# shellcheck shell=sh disable=SC2086
# $1: farm's folder, $2: session to keep, $3: exit code if processes do not end.
# A process belongs to a session if its current folder is the session's, or if it executes a file of the session. One
# `ls` finds the processes; each is checked again before it is ended, because a hostile folder name may look like a line
# of `ls`. `rm` follows no links.
cd -- "$1" 2>/dev/null || exit 0
root=$(pwd -P) keep=$2
strangers() {
    ls -l /proc/[0-9]*/cwd /proc/[0-9]*/exe 2>/dev/null | while IFS= read -r line; do
        case $line in
            *" /proc/"*" -> $root/run-"*) ;;
            *) continue ;;
        esac
        pid=${line#*" /proc/"}
        pid=${pid%%/*}
        case $pid in "" | *[!0-9]*) continue ;; esac
        cwd=$(readlink "/proc/$pid/cwd" 2>/dev/null) exe=$(readlink "/proc/$pid/exe" 2>/dev/null)
        case $cwd/ in "$root/$keep/"*) continue ;; esac
        case $exe/ in "$root/$keep/"*) continue ;; esac
        case $cwd in "$root/run-"*) echo "$pid"; continue ;; esac
        case $exe in "$root/run-"*) echo "$pid" ;; esac
    done
}
tries=0
while left=$(strangers); [ -n "$left" ]; do
    if [ "$tries" -ge 100 ]; then echo $left; exit "$3"; fi
    kill -9 $left 2>/dev/null
    tries=$((tries + 1))
    sleep 0.1
done
for folder in run-*; do
    if [ "$folder" != "$keep" ]; then rm -rf -- "$folder"; fi
done
true
