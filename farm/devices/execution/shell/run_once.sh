# shellcheck shell=sh
# Runs in the workspace. $1: number of executions of each line of the input list, $2: the list with the lines repeated,
# $3: folder of outputs; then the program with its flags. The program is killed at the end of standard input, which
# stays open while farm waits. Output of the program goes to standard error. The exit code is the program's.
times=$1 repeated=$2 outputs=$3; shift 3
mkdir -p -- "$outputs" || exit 1
while IFS= read -r line; do
    count=0
    while [ "$count" -lt "$times" ]; do
        printf '%s\n' "$line"
        count=$((count + 1))
    done
done <input_list.txt >"$repeated" || exit 1
exec 3<&0
"$@" </dev/null 3<&- >&2 &
program=$!
{
    while read -r _; do :; done <&3
    kill "$program"
    sleep 1
    kill -9 "$program"
} >/dev/null 2>&1 &
watcher=$!
wait "$program"
code=$?
kill -9 "$watcher"
exit "$code"
