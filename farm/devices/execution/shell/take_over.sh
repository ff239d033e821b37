# shellcheck shell=sh disable=SC2086
# $1: the farm's folder, $2: the session that stays, $3: the exit code for processes that do not end.
# A process belongs to a session when it works in its folder, or executes one of its files. One `ls` tells that of all
# processes; what it says is asked for again of those few that are to be ended, as a folder's name can be made to look
# like a line of it. `rm` follows no link.
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
